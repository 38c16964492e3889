"""What a store of LoRAs is to have, and what it has: two lists that the dispatcher knows, too.

Both travel as changes; see :mod:`ray_cluster.protocol.calling.changes`.
"""

from __future__ import annotations

from ray_cluster.protocol.calling.changes import ChangeLog, Mark
from ray_cluster.protocol.loras import LoraOrder, LoraOrders, LoraReport, LoraReports

# changes in one message: they are read on the dispatcher's event loop
_MOST_AT_ONCE = 200


class OrderList:
    """What a store is to have.

    Attributes:
        by_id: in the order in which they became what they are.
        mark: how far it is known.
        removed: ids of what nobody will use again, until it is deleted.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, LoraOrder] = {}
        self.removed: set[str] = set()
        self.mark = Mark()

    def begin(self) -> None:
        """Have the dispatcher send all of it."""
        self.mark = Mark()

    def apply(self, said: LoraOrders) -> set[str]:
        """Apply changes, unless they do not follow what is known; return what they concern."""
        if not self.mark.follows(said.after, said.upto):
            return set()
        concerned = {*said.dropped, *(one.lora.lora_id for one in said.orders)}
        if said.after.number == 0:
            concerned |= self.by_id.keys()
            self.by_id = {}
        self.mark = Mark(said.after.session, said.upto)
        self.removed.update(said.removed)
        for lora_id in said.dropped:
            self.by_id.pop(lora_id, None)
        for order in said.orders:
            # behind those that were there before
            self.by_id.pop(order.lora.lora_id, None)
            self.by_id[order.lora.lora_id] = order
        return concerned


class ReportList:
    """What a store has, or could not get, and how much of that the dispatcher has heard."""

    def __init__(self) -> None:
        self._by_id: dict[str, LoraReport] = {}
        self._changes = ChangeLog()
        self._gone: dict[str, int] = {}
        self._session = 1
        # None before the dispatcher has said that it knows this list at all
        self._heard: int | None = None

    def get(self, lora_id: str) -> LoraReport | None:
        """Return the report of a LoRA."""
        return self._by_id.get(lora_id)

    @property
    def ready(self) -> dict[str, LoraReport]:
        """What it has, by id."""
        return {name: one for name, one in self._by_id.items() if one.state == "ready"}

    def put(self, report: LoraReport) -> None:
        """Report something new of a LoRA."""
        self._by_id[report.lora_id] = report
        self._gone.pop(report.lora_id, None)
        self._changes.note(report.lora_id)

    def drop(self, lora_id: str) -> None:
        """Report nothing of a LoRA any more."""
        if self._by_id.pop(lora_id, None) is not None:
            self._gone[lora_id] = self._changes.note(lora_id)

    def begin(self) -> None:
        """Report everything again, to a dispatcher that knows nothing."""
        self._session += 1
        self._heard = None

    def note_heard(self, mark: Mark) -> None:
        """Note how far the dispatcher knows this list."""
        if mark.session != self._session:
            self._heard = None
            return
        self._heard = mark.number
        # who knows more needs no word of what was gone before
        for lora_id in [name for name, at in self._gone.items() if at <= mark.number]:
            del self._gone[lora_id]
            self._changes.forget(lora_id)

    @property
    def has_news(self) -> bool:
        """Whether the dispatcher has not heard all, as far as it has said."""
        return self._heard is None or self._heard < self._changes.number

    def news(self) -> LoraReports | None:
        """Return what the dispatcher has not heard, or some of it; None if it has heard all."""
        if not self.has_news:
            return None
        heard = self._heard or 0
        piece = self._changes.since(heard, _MOST_AT_ONCE, self._by_id.__contains__)
        reports = tuple(self._by_id[one] for one in piece.names if one in self._by_id)
        gone = tuple(one for one in piece.names if one not in self._by_id)
        return LoraReports(Mark(self._session, heard), piece.upto, reports, gone)
