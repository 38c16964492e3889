"""How a replica says that leases have ended, until it has been heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ray_cluster.errors import DispatcherUnavailable, InvalidRequest, RequestFailed
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Fence, Lease, ReplicaEvent, Returned
from ray_cluster.requests import Failure

logger = logging.getLogger(__name__)

_RETRY_S = (0.1, 0.3, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class LeaseEnding:
    """The end of a lease."""

    lease: Lease
    event: ReplicaEvent


class OutcomeReporter:
    """The ends of a replica's leases, each until the dispatcher has acknowledged it.

    Args:
        link: the dispatcher.
        on_heard: told the id of each request whose end was acknowledged, but not if it was only
            handed back.
    """

    def __init__(
        self, link: DispatcherLink, replica_id: str, on_heard: Callable[[str], None]
    ) -> None:
        self._link = link
        self._replica_id = replica_id
        self._on_heard = on_heard
        self._pending: list[LeaseEnding] = []
        self._has_news = asyncio.Event()
        self._is_known = asyncio.Event()
        self._is_known.set()

    @property
    def leases(self) -> list[Lease]:
        """The leases whose end is not acknowledged yet."""
        return [end.lease for end in self._pending]

    def add(self, lease: Lease, event: ReplicaEvent) -> None:
        """Have the end of a lease reported."""
        self._pending.append(LeaseEnding(lease, event))
        self._has_news.set()

    def adopt(self, fence_by_id: Mapping[str, Fence]) -> None:
        """Report under new fences what was leased under others, now that the dispatcher agrees."""
        self._pending = [
            LeaseEnding(end.lease, replace(end.event, fence=fence_by_id[end.event.request_id]))
            if end.event.request_id in fence_by_id
            else end
            for end in self._pending
        ]
        self._is_known.set()

    def drop(self, request_id: str) -> None:
        """Say nothing more of earlier leases on a request."""
        self._pending = [end for end in self._pending if end.event.request_id != request_id]

    async def report_forever(self) -> None:
        """Report what is added, each until it is acknowledged."""
        failures = 0
        while True:
            await self._is_known.wait()
            await self._has_news.wait()
            self._has_news.clear()
            try:
                await self.report()
            except DispatcherUnavailable as error:
                self._has_news.set()
                await back_off(failures, error)
                failures += 1
            else:
                failures = 0

    async def report(self) -> None:
        """Report what is pending, once; all of it remains if the dispatcher is a new one.

        Raises:
            DispatcherUnavailable: it remains pending.
        """
        reported: Sequence[LeaseEnding] = tuple(self._pending)
        if not reported:
            return
        stale = await self._link.report(self._replica_id, tuple(end.event for end in reported))
        if stale is None:
            # until a poll has asked for adoption
            self._is_known.clear()
            self._has_news.set()
            return
        self._pending = [end for end in self._pending if end not in reported]
        for end in reported:
            if not isinstance(end.event, Returned):
                self._on_heard(end.event.request_id)


async def back_off(failures: int, error: DispatcherUnavailable) -> None:
    """Wait before the dispatcher is tried again, after so many failures before this one."""
    if failures == 0:
        logger.warning("the dispatcher cannot be reached (%s); trying again", error)
    await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])


def failure_of(request_id: str, error: RequestFailed | InvalidRequest) -> Failure:
    """Return what the client is told of an error."""
    if isinstance(error, InvalidRequest):
        return Failure(request_id, "invalid", error.message, "encode", error.param)
    return Failure(request_id, "error", error.message, error.stage)
