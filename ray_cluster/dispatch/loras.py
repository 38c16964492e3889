"""The LoRAs of a cell: which there are, which stores have them, and what requests wait for.

A request whose LoRAs no store has yet waits in the dispatcher, not in a replica's place, while the
stores fetch them (SwiftDiffusion, section 4.2, fetches beside the first steps instead, so that an
image depends on how long that takes; here only those that are to begin without do, for steps that
the call and the settings tell). Without a live store nothing is held back, except at the
start, while the first one is expected: replicas fetch for themselves.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from ray_cluster.protocol.loras import (
    Lora,
    LoraAdded,
    LoraFacts,
    LoraLookup,
    LoraOrder,
    LoraReport,
    LoraState,
    LoraStatus,
)
from ray_cluster.requests import Failure, ImageRequest

# after which a store that does not mention an order is told again
_REPEAT_S = 5.0
# seconds that a LoRA is expected to take while none was fetched
_FIRST_FETCH_S = 5.0
# weight of the latest one in what further ones are expected to take
_LATEST_SHARE = 0.3
# names that are compared with one that there is not
_MOST_COMPARED = 1000
_NUM_NEAR = 3


@dataclass(slots=True)
class _Known:
    """A registered LoRA.

    Attributes:
        num_open: requests with it that have not ended.
        attempt: of its order; greater after a failure that may not happen again.
        failure: the report of that, while it holds.
        ordered_s: instant since which a store is to have it; None while none is.
    """

    lora: Lora
    facts: LoraFacts | None = None
    num_uses: int = 0
    num_open: int = 0
    attempt: int = 0
    failure: LoraReport | None = None
    ordered_s: float | None = None
    is_removed: bool = False

    @property
    def is_wanted(self) -> bool:
        return self.num_open > 0 or (self.lora.is_pinned and not self.is_removed)


@dataclass(slots=True)
class _Store:
    """A live store: what it says it has, and what it was last told to have."""

    node: str
    reports: dict[str, LoraReport] = field(default_factory=dict)
    told: tuple[LoraOrder, ...] | None = None
    told_s: float = 0.0

    def knows(self, orders: Sequence[LoraOrder], now_s: float) -> bool:
        """Whether it was told these, or has just been and may not have heard it."""
        if orders != self.told:
            return False
        is_heard = all(_answers(self.reports.get(one.lora.lora_id), one) for one in orders)
        return is_heard or now_s < self.told_s + _REPEAT_S


class Loras:
    """Knows the LoRAs of a cell; decides nothing.

    Args:
        base_model_of: returns what pools of a model call their model.
        max_loras: that may be registered.
    """

    def __init__(self, base_model_of: Callable[[str], str], max_loras: int = 10_000) -> None:
        self._base_model_of = base_model_of
        self.max_loras = max_loras
        self._by_id: dict[str, _Known] = {}
        self._by_name: dict[str, _Known] = {}
        self._names: list[str] = []
        self._wanted: dict[str, _Known] = {}
        self._stores: dict[str, _Store] = {}
        self._expected_until_s: float | None = None
        self._gone: list[str] = []
        self._found: list[tuple[str, LoraFacts]] = []
        self._took_s = _FIRST_FETCH_S
        self._bytes_per_s: float | None = None

    def __len__(self) -> int:
        return len(self._by_name)

    # the registry

    def restore(self, lora: Lora, facts: LoraFacts | None, *, is_removed: bool) -> None:
        """Know a LoRA that an earlier dispatcher has registered, and perhaps removed since.

        However many may be registered by now, and though its name may have been given again.
        """
        self._know(_Known(lora, facts, is_removed=is_removed))

    def add(self, lora: Lora) -> LoraAdded:
        """Register a LoRA, unless its name is taken; the same one again is no error."""
        known = self._by_name.get(lora.name)
        if known is not None:
            is_same = _is_same(known.lora, lora)
            return LoraAdded(self._status(known), None if is_same else "exists")
        if len(self._by_name) >= self.max_loras:
            return LoraAdded(None, "too_many")
        known = _Known(lora)
        self._know(known)
        return LoraAdded(self._status(known))

    def _know(self, known: _Known) -> None:
        lora = known.lora
        self._by_id[lora.lora_id] = known
        if not known.is_removed:
            self._by_name[lora.name] = known
            insort(self._names, lora.name)
        self._note_wanted(known)

    def withdraw(self, lora: Lora) -> None:
        """Take back a registration that could not be written."""
        if self.remove(lora.name) is not None:
            self._gone = [one for one in self._gone if one != lora.lora_id]

    def remove(self, name: str) -> LoraStatus | None:
        """Offer a LoRA no more, and forget it once no open request uses it."""
        known = self._by_name.pop(name, None)
        if known is None:
            return None
        self._names.pop(bisect_right(self._names, name) - 1)
        known.is_removed = True
        status = self._status(known)
        self._note_wanted(known)
        self._forget_unused(known)
        return status

    def drop_removed(self) -> None:
        """Forget removed LoRAs that no open request uses, once the open ones are known."""
        for known in list(self._by_id.values()):
            self._forget_unused(known)

    def take_gone(self) -> list[str]:
        """Return the ids that were forgotten since the last call."""
        gone, self._gone = self._gone, []
        return gone

    def take_found(self) -> list[tuple[str, LoraFacts]]:
        """Return what was found out of LoRAs since the last call."""
        found, self._found = self._found, []
        return found

    def page(self, after: str, limit: int) -> tuple[LoraStatus, ...]:
        """Return LoRAs by name, those after a name."""
        first = bisect_right(self._names, after)
        names = self._names[first : first + limit]
        return tuple(self._status(self._by_name[name]) for name in names)

    def lookup(self, names: Iterable[str]) -> LoraLookup:
        """Return the LoRAs of these names, and for others names that look like them."""
        given = list(dict.fromkeys(names))
        found = {one: self._status(self._by_name[one]) for one in given if one in self._by_name}
        near = {one: self._near(one) for one in given if one not in found}
        return LoraLookup(found, near)

    def _near(self, name: str) -> tuple[str, ...]:
        alike = (one for one in self._names if one[0].lower() == name[:1].lower())
        compared = list(islice(alike, _MOST_COMPARED))
        if len(compared) < _MOST_COMPARED:
            compared += self._names[: _MOST_COMPARED - len(compared)]
        return tuple(difflib.get_close_matches(name, dict.fromkeys(compared), _NUM_NEAR, 0.5))

    def _status(self, known: _Known) -> LoraStatus:
        failure = known.failure
        nodes = {one.node for one in self._stores.values() if _has(one, known)}
        return LoraStatus(
            lora=known.lora,
            state=self._state(known, nodes),
            facts=known.facts,
            reason="" if failure is None else failure.reason,
            is_permanent=failure is not None and failure.failure == "invalid",
            num_uses=known.num_uses,
            nodes=tuple(sorted(nodes)),
        )

    def _state(self, known: _Known, nodes: Collection[str]) -> LoraState:
        if known.is_removed:
            return "removing"
        if nodes:
            return "ready"
        if known.failure is not None:
            return "failed"
        return "fetching" if known.is_wanted and self._stores else "registered"

    # requests

    def note_open(self, request: ImageRequest) -> None:
        """Count an accepted request; what it needs is ordered from now on."""
        for known in self._of(request):
            known.num_open += 1
            known.num_uses += 1
            if known.failure is not None and known.failure.failure == "unreachable":
                known.attempt += 1
                known.failure = None
            self._note_wanted(known)

    def note_end(self, request: ImageRequest) -> None:
        """Count a request no more."""
        for known in self._of(request):
            known.num_open -= 1
            self._note_wanted(known)
            self._forget_unused(known)

    def holds_back(self, request: ImageRequest, steps_done: int = 0) -> bool:
        """Whether a request has to wait until a store has what its next step needs."""
        if self._unknown(request) is not None:
            return True
        if steps_done < request.add_ons.lora_start_step:
            return False
        if not self._stores and self._expected_until_s is None:
            return False
        return any(not self._is_ready(one) for one in self._of(request))

    def failure(self, request: ImageRequest) -> Failure | None:
        """Return how a request ends that waits for what is not to be had; None if it may be."""
        name = request.request_id
        if (unknown := self._unknown(request)) is not None:
            message = f"the LoRA {unknown!r} was removed"
            return Failure(name, "invalid", message, "lora", "loras", code="lora_failed")
        for known in self._of(request):
            report = known.failure
            if report is None or self._is_ready(known):
                continue
            message = f"the LoRA {known.lora.name!r} cannot be had: {report.reason}"
            if report.failure == "invalid":
                return Failure(name, "invalid", message, "lora", "loras", code="lora_failed")
            return Failure(name, "error", message, "lora")
        return None

    def fetch_s(self, requests: Sequence[ImageRequest], now_s: float) -> float:
        """Return the seconds that requests will probably wait for their LoRAs.

        Nothing for those that begin without: what is left to wait after these steps is not known.
        """
        if not self._stores:
            return 0.0
        missing = {
            known.lora.lora_id: known
            for request in requests
            if not request.add_ons.lora_start_step
            for known in self._of(request)
            if not self._is_ready(known)
        }
        # several are fetched at the same time
        return max((self._left_s(known, now_s) for known in missing.values()), default=0.0)

    def _left_s(self, known: _Known, now_s: float) -> float:
        whole_s = self._took_s
        if known.facts is not None and self._bytes_per_s is not None:
            whole_s = known.facts.num_bytes / self._bytes_per_s
        return whole_s if known.ordered_s is None else max(0.0, whole_s - now_s + known.ordered_s)

    def orders_of(self, request: ImageRequest) -> tuple[LoraOrder, ...]:
        """Return what a replica needs to know of a request's LoRAs."""
        return tuple(self._order(known) for known in self._of(request))

    def _unknown(self, request: ImageRequest) -> str | None:
        """Return the name of a LoRA that was removed between the call's check and its admission."""
        uses = request.add_ons.loras
        gone = (use.name for use in uses if use.lora_id and use.lora_id not in self._by_id)
        return next(gone, None)

    def _of(self, request: ImageRequest) -> list[_Known]:
        found = (self._by_id.get(use.lora_id) for use in request.add_ons.loras)
        return [known for known in found if known is not None]

    def _note_wanted(self, known: _Known) -> None:
        if known.is_wanted:
            self._wanted.setdefault(known.lora.lora_id, known)
        elif self._wanted.pop(known.lora.lora_id, None) is not None:
            known.ordered_s = None

    def _forget_unused(self, known: _Known) -> None:
        if known.is_removed and not known.num_open and known.lora.lora_id in self._by_id:
            del self._by_id[known.lora.lora_id]
            self._gone.append(known.lora.lora_id)

    # stores

    @property
    def store_ids(self) -> Collection[str]:
        """The live stores."""
        return self._stores.keys()

    def expect_stores(self, until_s: float) -> None:
        """Hold requests back although no store lives yet: one will, or at that instant not."""
        self._expected_until_s = until_s

    def gives_up(self, now_s: float) -> bool:
        """Whether stores are expected no more from now on."""
        if self._expected_until_s is None or now_s < self._expected_until_s:
            return False
        self._expected_until_s = None
        return True

    def join(self, store_id: str, node: str) -> None:
        """Note a store, of which nothing is known yet."""
        self._expected_until_s = None
        self._stores[store_id] = _Store(node)

    def leave(self, store_id: str) -> None:
        """Forget a store."""
        if self._stores.pop(store_id, None) is not None:
            self._judge()

    def hear(self, store_id: str, reports: Sequence[LoraReport]) -> None:
        """Note all that a store has, fetches, or could not get."""
        store = self._stores[store_id]
        before, store.reports = store.reports, {one.lora_id: one for one in reports}
        for report in reports:
            known, earlier = self._by_id.get(report.lora_id), before.get(report.lora_id)
            if known is None or report.facts is None:
                continue
            if report.facts != known.facts:
                known.facts = report.facts
                self._found.append((report.lora_id, report.facts))
            if report.took_s and (earlier is None or earlier.state != "ready"):
                self._note_fetch(report.took_s, report.facts.num_bytes)
        self._judge()

    def _note_fetch(self, took_s: float, num_bytes: int) -> None:
        self._took_s += _LATEST_SHARE * (took_s - self._took_s)
        rate = num_bytes / took_s
        known = self._bytes_per_s
        self._bytes_per_s = rate if known is None else known + _LATEST_SHARE * (rate - known)

    def _judge(self) -> None:
        """Note as failed what every store has failed to get."""
        for known in self._wanted.values():
            reports = [one.reports.get(known.lora.lora_id) for one in self._stores.values()]
            failed = [
                one
                for one in reports
                if one is not None and one.state == "failed" and one.attempt >= known.attempt
            ]
            is_failed = bool(failed) and len(failed) == len(reports)
            known.failure = failed[0] if is_failed else None

    def orders(self, store_id: str, now_s: float) -> tuple[LoraOrder, ...] | None:
        """Return all that a store is to have now, what is needed first; None if it knows."""
        store = self._stores.get(store_id)
        if store is None:
            return None
        wanted = sorted(self._wanted.values(), key=lambda one: one.num_open == 0)
        orders = tuple(self._order(known) for known in wanted)
        if store.knows(orders, now_s):
            return None
        store.told, store.told_s = orders, now_s
        for known in wanted:
            if known.ordered_s is None:
                known.ordered_s = now_s
        return orders

    def _order(self, known: _Known) -> LoraOrder:
        base_model = self._base_model_of(known.lora.base)
        return LoraOrder(known.lora, base_model, known.attempt, is_needed=known.num_open > 0)

    def _is_ready(self, known: _Known) -> bool:
        return any(_has(store, known) for store in self._stores.values())


def _has(store: _Store, known: _Known) -> bool:
    report = store.reports.get(known.lora.lora_id)
    return report is not None and report.state == "ready"


def _answers(report: LoraReport | None, order: LoraOrder) -> bool:
    """Whether a report shows that its store has heard an order."""
    return report is not None and (report.state == "ready" or report.attempt >= order.attempt)


def _is_same(one: Lora, other: Lora) -> bool:
    """Whether they say the same, but for id and instant."""
    return replace(other, lora_id=one.lora_id, added_s=one.added_s) == one
