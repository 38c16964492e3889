"""Where accepted requests wait: in the queue for a replica, or before that for their add-ons."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from ray_cluster.dispatch.loras.loras import Loras
from ray_cluster.dispatch.queue.due import AT_ONCE, Due
from ray_cluster.dispatch.queue.queue import WaitingQueue
from ray_cluster.dispatch.queue.shares import Lane
from ray_cluster.dispatch.records import RequestRecord
from ray_cluster.dispatch.workers.controlnets import ControlNets
from ray_cluster.policies.admission.load import NO_LOAD
from ray_cluster.policies.admission.queue_share import ShareView
from ray_cluster.policies.leasing.ordering import AGED_PRIORITY
from ray_cluster.policies.leasing.placement import passed_over
from ray_cluster.policies.types import RequestView
from ray_cluster.requests import Failure, ImageRequest


class WaitingRoom:
    """Holds requests back until a store has their LoRAs, and ControlNets are served.

    Attributes:
        queue: of those that a replica may be leased.
    """

    def __init__(self, loras: Loras, controls: ControlNets) -> None:
        self.queue = WaitingQueue()
        self._loras = loras
        self._controls = controls
        self._held_back: dict[str, RequestRecord] = {}
        self._held_by_lora: defaultdict[str, set[str]] = defaultdict(set)
        # of those, by the instants at which they give up
        self._due = Due(self._gives_up_s, self._held_back.get)
        self._to_look_at: dict[str, None] = {}
        # whose these are
        self._queued_lane, self._held_lane = Lane(), Lane()

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
        return self._queued_lane.counts + self._held_lane.counts

    def put(self, record: RequestRecord) -> None:
        """Let a request wait."""
        is_held_back = self._is_held_back(record.request, record.view.steps_done)
        # what is done to an image needs no add-ons
        if is_held_back and record.stages.present.rules.takes == "nothing":
            self._hold_back(record)
        else:
            self._enqueue(record)

    def _hold_back(self, record: RequestRecord) -> None:
        self._held_back[record.view.request_id] = record
        # what it waits for may have come, or failed, before
        self._to_look_at[record.view.request_id] = None
        self._held_lane.add(record.view, record.client)
        self._due.add(record, len(self._held_back))
        for use in record.request.add_ons.loras:
            self._held_by_lora[use.lora_id].add(record.view.request_id)

    def _hold_no_more(self, record: RequestRecord) -> None:
        name = record.view.request_id
        del self._held_back[name]
        self._held_lane.remove(name)
        for use in record.request.add_ons.loras:
            self._held_by_lora[use.lora_id].discard(name)
            if not self._held_by_lora[use.lora_id]:
                del self._held_by_lora[use.lora_id]

    def held_for(self, lora_ids: Iterable[str]) -> list[str]:
        """Return the ids of requests that wait, and have one of these LoRAs, as they came."""
        found = set().union(*(self._held_by_lora.get(one, ()) for one in lora_ids))
        # those of a job stay together: one that fails ends the others
        return [one for one in self._held_back if one in found] if found else []

    def _enqueue(self, record: RequestRecord) -> None:
        self.queue.add(record.view)
        self._queued_lane.add(record.view, record.client)

    def share(self, requests: Sequence[ImageRequest], model: str, client: str) -> ShareView:
        """Return what is in the way of requests: the queue, and what is held back like them.

        What is held back will be queued, so a client that has filled its share of the queue can
        have nothing held back; and what it has held back keeps no other request out of the queue.
        """
        is_held_back = any(self._is_held_back(one) for one in requests)
        queued = self._queued_lane.loads(model)
        held = self._held_lane.loads(model) if is_held_back else {}
        num_held = self._held_lane.counts[model] if is_held_back else 0
        return ShareView(
            queued.get(client, NO_LOAD).plus(held.get(client, NO_LOAD)),
            len({client, *queued, *held}),
            self._queued_lane.counts[model] + num_held,
            is_held_back=is_held_back,
            num_until=partial(self._num_until, model, client),
        )

    def _num_until(self, model: str, client: str, number: int) -> int:
        """Return how many wait up to a client's request of that number, the next one first."""
        whose = (self._queued_lane.client_of(one.request_id) for one in self.queue.of_model(model))
        places = (place for place, one in enumerate(whose, start=1) if one == client)
        return next(islice(places, number - 1, None), number)

    def _is_held_back(self, request: ImageRequest, steps_done: int = 0) -> bool:
        return self._loras.holds_back(request, steps_done) or self._controls.holds_back(request)

    def take_out(self, record: RequestRecord) -> None:
        """Let a request wait no more."""
        name = record.view.request_id
        if name in self._held_back:
            self._hold_no_more(record)
        else:
            self.queue.remove(name)
            self._queued_lane.remove(name)

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

    def wait_s(self, requests: Sequence[ImageRequest], now_s: float) -> float:
        """Return the seconds for which requests will probably be held back."""
        return max(self._loras.fetch_s(requests, now_s), self._controls.wait_s(requests))

    @property
    def next_due_s(self) -> float:
        """Instant at which :meth:`release` has something to do."""
        return -math.inf if self._to_look_at else self._due.next_s

    def _gives_up_s(self, record: RequestRecord) -> float:
        """Instant at which a request waits no more for ControlNets, if it lacks one."""
        if not self._controls.holds_back(record.request):
            return math.inf
        return self._controls.gives_up_s(record)

    def look_again(self, request_ids: Iterable[str] | None = None) -> None:
        """Have those looked at whose add-ons may have come or gone; all unless given."""
        if request_ids is None:
            self._due.restart(self._held_back)
            request_ids = self._held_back
        self._to_look_at.update(dict.fromkeys(request_ids))

    def release(
        self, now_s: float, only: Sequence[str] | None = None
    ) -> list[tuple[RequestRecord, Failure]]:
        """Queue requests whose add-ons are there by now; return those that cannot have them.

        Args:
            only: ids of those that are looked at; unless given, some of those that are to be, and
                the next ones in the next call.
        """
        failed = []
        if only is None:
            due = self._due.take(now_s)
            self._to_look_at.update({one.view.request_id: None for one in due})
            only = list(islice(self._to_look_at, AT_ONCE))
        for name in only:
            self._to_look_at.pop(name, None)
            if (record := self._held_back.get(name)) is None:
                continue
            failure = self._loras.failure(record.request) or self._controls.failure(record, now_s)
            if failure is not None:
                failed.append((record, failure))
            elif not self._is_held_back(record.request, record.view.steps_done):
                self._hold_no_more(record)
                if record.stages.is_last:
                    # admission has counted with one that is earlier by what fetching takes
                    record.view = replace(record.view, deadline_s=record.deadline_s)
                self._enqueue(record)
        return failed
