"""The leases of a replica, and the ends that the dispatcher has not acknowledged yet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ray_cluster.protocol.calling.sizes import first_that_fit
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Fence, Finished, Lease, ReplicaEvent, Returned
from ray_cluster.replica.retries import answered
from ray_cluster.requests import ImageRequest


@dataclass(frozen=True, slots=True, eq=False)
class _Ending:
    """The end of a lease."""

    lease: Lease
    event: ReplicaEvent


class HeldLeases:
    """Leases by request id; a new one on a request replaces the old one.

    Args:
        link: the dispatcher.
        on_acknowledged: called with the id of each request whose end the dispatcher has
            acknowledged, unless its lease was only returned, or is held again.
    """

    def __init__(
        self, link: DispatcherLink, replica_id: str, on_acknowledged: Callable[[str], None]
    ) -> None:
        self._link = link
        self._replica_id = replica_id
        self._on_acknowledged = on_acknowledged
        self._held: dict[str, Lease] = {}
        self._endings: list[_Ending] = []
        self._has_news = asyncio.Event()
        # cleared while the dispatcher is a new one that has not adopted the leases yet
        self._is_known = asyncio.Event()
        self._is_known.set()

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._held.values()))

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._held

    @property
    def num_unacknowledged(self) -> int:
        """How many ends the dispatcher has not acknowledged."""
        return len(self._endings)

    def progress(self, steps_done_by_id: Mapping[str, int]) -> dict[str, int]:
        """Return the steps done by id, of all held leases and of unacknowledged ends.

        Args:
            steps_done_by_id: of what the engine has; the others have taken all their steps.
        """
        leases = (*(end.lease for end in self._endings), *self._held.values())
        return {
            one.request_id: steps_done_by_id.get(one.request_id, one.num_steps)
            for one in (lease.request for lease in leases)
        }

    def get(self, request_id: str) -> Lease | None:
        """Return the lease that is held on a request."""
        return self._held.get(request_id)

    def lease_of(self, request: ImageRequest) -> Lease | None:
        """Return the lease of that very request if it is held, perhaps under a newer fence."""
        held = self._held.get(request.request_id)
        return held if held is not None and held.request is request else None

    def holds(self, request: ImageRequest) -> bool:
        """Whether the lease of that very request is held."""
        return self.lease_of(request) is not None

    def add(self, lease: Lease) -> Lease | None:
        """Hold a lease instead of earlier ones on its request; return the one that was held."""
        replaced = self.drop(lease.request.request_id)
        self._held[lease.request.request_id] = lease
        return replaced

    def drop(self, request_id: str) -> Lease | None:
        """Forget a request and the ends of earlier leases on it; return the lease that was held."""
        self._endings = [end for end in self._endings if end.event.request_id != request_id]
        return self._held.pop(request_id, None)

    def end(self, request: ImageRequest, event: ReplicaEvent) -> None:
        """Have the end of a request's lease reported under its newest fence, if it is held."""
        if (held := self.lease_of(request)) is not None:
            del self._held[request.request_id]
            self._endings.append(_Ending(held, replace(event, fence=held.fence)))
            self._has_news.set()

    def adopt(self, fence_by_id: Mapping[str, Fence]) -> None:
        """Continue under new fences with what the dispatcher took for lost, or never knew of."""
        for request_id, fence in fence_by_id.items():
            if (lease := self._held.get(request_id)) is not None:
                self._held[request_id] = replace(lease, fence=fence)
        self._endings = [
            _Ending(end.lease, replace(end.event, fence=fence_by_id[end.event.request_id]))
            if end.event.request_id in fence_by_id
            else end
            for end in self._endings
        ]
        self._is_known.set()

    def clear(self) -> None:
        """Hold nothing any more."""
        self._held.clear()

    async def report_forever(self) -> None:
        """Report each end until it is acknowledged."""
        while True:
            await self._is_known.wait()
            await self._has_news.wait()
            self._has_news.clear()
            await answered(self.report)

    async def report(self) -> None:
        """Report the unacknowledged ends once; they stay so if the dispatcher is a new one.

        Raises:
            DispatcherUnavailable: they stay unacknowledged.
        """
        is_known = True
        while self._endings and is_known:
            is_known = await self._report(first_that_fit(tuple(self._endings), _num_bytes))

    async def _report(self, reported: Sequence[_Ending]) -> bool:
        """Report some ends; return whether the dispatcher knows this replica."""
        stale = await self._link.report(self._replica_id, tuple(end.event for end in reported))
        if stale is None:
            # until a poll has asked for adoption
            self._is_known.clear()
            self._has_news.set()
            return False
        self._endings = [end for end in self._endings if end not in reported]
        for end in reported:
            request_id = end.event.request_id
            # it may have been leased to this replica again meanwhile
            if not isinstance(end.event, Returned) and request_id not in self._held:
                self._on_acknowledged(request_id)
        return True


def _num_bytes(end: _Ending) -> int:
    return len(end.event.result.data) if isinstance(end.event, Finished) else 0
