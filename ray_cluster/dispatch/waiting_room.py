"""Where accepted requests wait: in the queue for a replica, or before that for their LoRAs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from ray_cluster.dispatch.loras import Loras
from ray_cluster.dispatch.state import RequestRecord
from ray_cluster.dispatch.waiting import WaitingQueue
from ray_cluster.policies.ordering import AGED_PRIORITY
from ray_cluster.policies.placement import passed_over
from ray_cluster.policies.types import RequestView
from ray_cluster.requests import Failure


class WaitingRoom:
    """Holds requests back until a store has their LoRAs; all others are in the queue.

    Attributes:
        queue: of those that a replica may be leased.
    """

    def __init__(self, loras: Loras) -> None:
        self.queue = WaitingQueue()
        self._loras = loras
        self._held_back: dict[str, RequestRecord] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self._held_back)

    def __contains__(self, record: RequestRecord) -> bool:
        name = record.view.request_id
        return name in self._held_back or name in self.queue

    @property
    def views(self) -> Iterator[RequestView]:
        """All that wait."""
        yield from self.queue
        yield from (record.view for record in self._held_back.values())

    def count_by_model(self) -> Counter[str]:
        """Return how many requests wait, by model."""
        return Counter(view.model for view in self.views)

    def put(self, record: RequestRecord) -> None:
        """Let a request wait."""
        if self._is_held_back(record):
            self._held_back[record.view.request_id] = record
        else:
            self.queue.add(record.view)

    def _is_held_back(self, record: RequestRecord) -> bool:
        return self._loras.holds_back(record.request, record.view.steps_done)

    def take_out(self, record: RequestRecord) -> None:
        """Let a request wait no more."""
        if self._held_back.pop(record.view.request_id, None) is None:
            self.queue.remove(record.view.request_id)

    def discard(self, record: RequestRecord) -> None:
        """Let a request wait no more, if it does."""
        if record in self:
            self.take_out(record)

    def note_passed(self, record: RequestRecord) -> None:
        """Count a later request that is leased before this one."""
        record.view = passed_over(record.view)
        self.queue.replace(record.view)

    def put_first(self, record: RequestRecord) -> None:
        """Have a request go before all others, now if it waits, or whenever it does again."""
        waits = record in self
        if waits:
            self.take_out(record)
        record.view = replace(record.view, priority=AGED_PRIORITY)
        if waits:
            self.put(record)

    def release(self) -> list[tuple[RequestRecord, Failure]]:
        """Queue the requests whose LoRAs are there by now; return those that cannot have them."""
        failed = []
        for name, record in list(self._held_back.items()):
            if (failure := self._loras.failure(record.request)) is not None:
                failed.append((record, failure))
            elif not self._is_held_back(record):
                del self._held_back[name]
                if record.cascade is None:
                    # admission has counted with one that is earlier by what fetching takes
                    record.view = replace(record.view, deadline_s=record.deadline_s)
                self.queue.add(record.view)
        return failed
