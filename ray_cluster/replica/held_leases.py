"""The leases of a replica: those it holds, and those whose ends the dispatcher has not heard of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ray_cluster.protocol.leases import Fence, Lease, ReplicaEvent
from ray_cluster.replica.outcome_reporter import OutcomeReporter
from ray_cluster.requests import ImageRequest


class HeldLeases:
    """Leases by request id; one that is leased anew replaces what there was.

    Args:
        ends: reports what is ended here.
    """

    def __init__(self, ends: OutcomeReporter) -> None:
        self._ends = ends
        self._held: dict[str, Lease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._held.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    def progress(self, steps_done_by_id: Mapping[str, int]) -> dict[str, int]:
        """Return the steps of all that the dispatcher is to be told of, by id.

        Those are the held ones, and those whose end it has not heard of.

        Args:
            steps_done_by_id: of what the engine has; the others have taken all theirs.
        """
        requests = (one.request for one in (*self._ends.leases, *self._held.values()))
        return {
            one.request_id: steps_done_by_id.get(one.request_id, one.num_steps) for one in requests
        }

    def get(self, request_id: str) -> Lease | None:
        """Return the lease that is held on a request."""
        return self._held.get(request_id)

    def holds(self, request: ImageRequest) -> bool:
        """Whether the lease of that very request is held, perhaps under a newer fence."""
        held = self._held.get(request.request_id)
        return held is not None and held.request is request

    def add(self, lease: Lease) -> None:
        """Hold a lease."""
        self._held[lease.request.request_id] = lease

    def drop(self, request_id: str) -> Lease | None:
        """Hold a request no more, and say nothing of earlier leases on it; return what was held."""
        self._ends.drop(request_id)
        return self._held.pop(request_id, None)

    def end(self, request: ImageRequest, event: ReplicaEvent) -> None:
        """Have the end of a request's lease reported under its newest fence, if it is held."""
        if self.holds(request):
            held = self._held.pop(request.request_id)
            self._ends.add(held, replace(event, fence=held.fence))

    def adopt(self, fence_by_id: Mapping[str, Fence]) -> None:
        """Go on under new fences with what the dispatcher took for lost, or never knew of."""
        for request_id, fence in fence_by_id.items():
            if (lease := self._held.get(request_id)) is not None:
                self._held[request_id] = replace(lease, fence=fence)
        self._ends.adopt(fence_by_id)

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()
