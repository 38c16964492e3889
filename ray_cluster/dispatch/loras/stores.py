"""The live stores of LoRAs: what each is to have, what it says it has, and who must hear now.

Both lists travel as changes (:mod:`ray_cluster.protocol.calling.changes`). A change costs what it
changes, however many LoRAs and stores there are: a LoRA that is ready everywhere wakes no store,
and what only keeps it from being deleted is sent with the next message that a store needs, or asks
for when it is about to make room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ray_cluster.dispatch.loras.registry import KnownLora, LoraRegistry
from ray_cluster.protocol.calling.changes import ChangeLog, Mark
from ray_cluster.protocol.loras import LoraOrder, LoraOrders, LoraReport, LoraReports

# after which changes are sent again that a store does not say it has applied
_REPEAT_S = 5.0
# changes in one message: their numbers bound what a message costs the event loop
_MOST_AT_ONCE = 200
# ends of orders that are remembered; a store that has heard of none of these gets all orders anew
_MOST_ENDS = 1000


@dataclass(slots=True)
class _Store:
    """A live store.

    Attributes:
        reports: by id, also of LoRAs that are not known here.
        heard: how far its reports are known.
        session: of the orders to it; 0 before the first.
        applied: number of the last change of orders that it has applied; None before it has any.
        told: number of the last change that was sent to it.
        told_s: instant of the first message that it may not have heard.
        urgent: number of the last change that it must hear of at once.
        begun: number of the last change before that list began, without what had ended by then.
        removed: what it is to delete, and has not said that it has heard of, with its number.
    """

    node: str
    urgent: int
    session: int = 0
    reports: dict[str, LoraReport] = field(default_factory=dict)
    heard: Mark = field(default_factory=Mark)
    applied: int | None = None
    told: int | None = None
    told_s: float = 0.0
    begun: int = 0
    removed: OrderedDict[str, int] = field(default_factory=OrderedDict)

    def after(self, now_s: float) -> int | None:
        """Return the number of the change that the next message follows; None for a new list."""
        if self.told is not None and now_s < self.told_s + _REPEAT_S:
            # it may not have heard yet what it was just told
            return max(self.told, self.applied or 0)
        return self.applied


class LoraStores:
    """Knows the live stores, and tells each of them what has changed of its orders.

    Args:
        order_of: returns the order of a LoRA that stores are to have.
    """

    def __init__(self, registry: LoraRegistry, order_of: Callable[[KnownLora], LoraOrder]) -> None:
        self._registry = registry
        self._order_of = order_of
        self._by_id: dict[str, _Store] = {}
        self._wanted: dict[str, KnownLora] = {}
        self._changes = ChangeLog()
        # ids of what is not ordered any more, the oldest end first
        self._ends: OrderedDict[str, None] = OrderedDict()
        self._oldest_end = 0
        self._num_sessions = 0
        self._alerted: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def ids(self) -> Collection[str]:
        return self._by_id.keys()

    @property
    def wanted(self) -> Collection[KnownLora]:
        """What stores are to have now."""
        return self._wanted.values()

    def join(self, store_id: str, node: str) -> None:
        """Note a store, of which nothing is known yet."""
        self._by_id[store_id] = _Store(node, urgent=self._changes.number)
        self._judge_all()

    def leave(self, store_id: str) -> None:
        """Forget a store, and what it has said."""
        store = self._by_id.get(store_id)
        if store is not None:
            self._drop_reports(store_id, store, list(store.reports))
            del self._by_id[store_id]
            self._judge_all()

    def note_known(self, known: KnownLora) -> None:
        """Take into account what stores have said of a LoRA before it was known here."""
        for store_id, store in self._by_id.items():
            if (report := store.reports.get(known.lora.lora_id)) is not None:
                self._put_report(store_id, store, report)

    def _judge_all(self) -> None:
        for known in self._wanted.values():
            self._judge(known)

    def _judge(self, known: KnownLora) -> None:
        """Note a LoRA as failed while it is wanted and every store has failed to get it."""
        if known.is_wanted:
            is_failed = bool(known.failed) and len(known.failed) == len(self._by_id)
            known.failure = next(iter(known.failed.values())) if is_failed else None

    # orders

    def note_change(self, known: KnownLora) -> None:
        """Send the order of a LoRA, or its end: at once to those that have yet to get it."""
        lora_id = known.lora.lora_id
        number = self._changes.note(lora_id)
        self._ends.pop(lora_id, None)
        self._wanted[lora_id] = known
        if not known.is_wanted:
            del self._wanted[lora_id]
            self._note_end(known, number)
        elif len(known.ready) + len(known.failed) < len(self._by_id):
            for store_id, store in self._by_id.items():
                if known.lacks(store_id):
                    store.urgent = number
                    self._alerted.add(store_id)

    def note_removed(self, known: KnownLora) -> None:
        """Have stores delete a LoRA that nobody will use again, if they may have it."""
        was_ordered = known.num_uses > 0 or known.lora.is_pinned
        told = [store for name, store in self._by_id.items() if was_ordered or name in known.ready]
        if told:
            number = self._changes.note(known.lora.lora_id)
            self._note_end(known, number)
            for store in told:
                # with the next poll is soon enough
                store.urgent = store.removed[known.lora.lora_id] = number
                if len(store.removed) > _MOST_ENDS:
                    store.removed.popitem(last=False)

    def _note_end(self, known: KnownLora, number: int) -> None:
        self._ends[known.lora.lora_id] = None
        self._ends.move_to_end(known.lora.lora_id)
        if len(self._ends) > _MOST_ENDS:
            oldest, _ = self._ends.popitem(last=False)
            self._oldest_end = self._changes.forget(oldest)
        if known.lora.is_pinned:
            # others that are pinned may have waited for its room: with the next poll is soon enough
            for store in self._by_id.values():
                store.urgent = number

    def take_alerted(self) -> set[str]:
        """Return the stores that have been noted since the last call to be answered at once."""
        alerted, self._alerted = self._alerted, set()
        return alerted

    def note_applied(self, store_id: str, mark: Mark) -> None:
        """Note how far a store says that it has applied its orders."""
        if (store := self._by_id.get(store_id)) is None:
            return
        is_of_this_list = mark.session == store.session > 0
        is_true = is_of_this_list and mark.number <= self._changes.number
        store.applied = mark.number if is_true else None
        while store.removed and is_true and next(iter(store.removed.values())) <= mark.number:
            store.removed.popitem(last=False)

    def orders(self, store_id: str, now_s: float) -> LoraOrders | None:
        """Return what has changed of a store's orders; None if there is nothing it must know."""
        store = self._by_id.get(store_id)
        if store is None:
            return None
        number = store.after(now_s)
        if number is not None and store.urgent <= number:
            return None
        if not number or max(number, store.begun) < self._oldest_end:
            # it has nothing, or would not hear of some orders that they have ended
            number = store.applied = None
            self._begin(store)
        if number == store.applied:
            # what follows changes that are still on their way is lost with these
            store.told_s = now_s
        return self._message(store, number or 0, now_s)

    def _begin(self, store: _Store) -> None:
        """Begin a new list: whoever hears late of an earlier one is not taken to know this one."""
        self._num_sessions += 1
        store.session, store.begun = self._num_sessions, self._changes.number

    def _message(self, store: _Store, number: int, now_s: float) -> LoraOrders:
        piece = self._changes.since(number, _MOST_AT_ONCE, self._is_ordered)
        store.told = piece.upto
        orders, dropped = [], []
        for lora_id in piece.names:
            known = self._registry.get(lora_id)
            if known is None or not known.is_wanted:
                dropped.append(lora_id)
                continue
            if known.ordered_s is None:
                known.ordered_s = now_s
            orders.append(self._order_of(known))
        after = Mark(store.session, number)
        removed = tuple(one for one, at in store.removed.items() if at <= piece.upto)
        return LoraOrders(after, piece.upto, tuple(orders), tuple(dropped), removed)

    def _is_ordered(self, lora_id: str) -> bool:
        known = self._registry.get(lora_id)
        return known is not None and known.is_wanted

    # reports

    def mark(self, store_id: str) -> Mark:
        """Return how far a store's reports are known."""
        store = self._by_id.get(store_id)
        return Mark() if store is None else store.heard

    def hear(self, store_id: str, said: LoraReports) -> list[LoraReport]:
        """Note what has changed of what a store has; return its reports that are news."""
        store = self._by_id.get(store_id)
        if store is None:
            return []
        # it may be about to make room, and must know all that it is to keep
        store.urgent = self._changes.number
        # one of an earlier session was long on its way
        is_old = said.after.session < store.heard.session
        if is_old or not store.heard.follows(said.after, said.upto):
            return []
        store.heard = Mark(said.after.session, said.upto)
        kept = {one.lora_id for one in said.reports}
        gone = said.gone if said.after.number else [one for one in store.reports if one not in kept]
        self._drop_reports(store_id, store, gone)
        news = [one for one in said.reports if store.reports.get(one.lora_id) != one]
        for report in news:
            store.reports[report.lora_id] = report
            self._put_report(store_id, store, report)
        return news

    def _drop_reports(self, store_id: str, store: _Store, lora_ids: Iterable[str]) -> None:
        for lora_id in lora_ids:
            known = self._registry.get(lora_id)
            if store.reports.pop(lora_id, None) is not None and known is not None:
                _forget_report(known, store_id)
                self._judge(known)

    def _put_report(self, store_id: str, store: _Store, report: LoraReport) -> None:
        if (known := self._registry.get(report.lora_id)) is None:
            return
        _forget_report(known, store_id)
        if report.state == "ready":
            known.ready[store_id] = store.node
        elif report.attempt >= known.attempt:
            known.failed[store_id] = report
            if known.num_open:
                known.forget_no_room()
        self._judge(known)


def _forget_report(known: KnownLora, store_id: str) -> None:
    known.ready.pop(store_id, None)
    known.failed.pop(store_id, None)
