"""What a replica makes of a lease's state, and how it says that a lease has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ray_cluster.engine.state import RequestState
from ray_cluster.errors import DispatcherUnavailable, InvalidRequest, RequestFailed
from ray_cluster.leases import DispatcherLink, Fence, Lease, ReplicaEvent, Returned
from ray_cluster.logs import bound, fields_of, without_prompts
from ray_cluster.requests import Failure

logger = logging.getLogger(__name__)

_RETRY_S = (0.1, 0.3, 1.0)


@dataclass(frozen=True, slots=True, eq=False)
class LeaseEnd:
    """The end of a lease."""

    lease: Lease
    event: ReplicaEvent


class LeaseEnds:
    """The ends of a replica's leases, each until the dispatcher has acknowledged it.

    Args:
        link: the dispatcher.
    """

    def __init__(self, link: DispatcherLink, replica_id: str) -> None:
        self._link = link
        self._replica_id = replica_id
        self._pending: list[LeaseEnd] = []
        self._has_news = asyncio.Event()
        self._is_known = asyncio.Event()
        self._is_known.set()

    @property
    def leases(self) -> list[Lease]:
        """The leases whose end is not acknowledged yet."""
        return [end.lease for end in self._pending]

    def add(self, lease: Lease, event: ReplicaEvent) -> None:
        """Have the end of a lease reported."""
        self._pending.append(LeaseEnd(lease, event))
        self._has_news.set()

    def adopt(self, fence_by_id: Mapping[str, Fence]) -> None:
        """Report under new fences what was leased under others, now that the dispatcher agrees."""
        self._pending = [
            LeaseEnd(end.lease, replace(end.event, fence=fence_by_id[end.event.request_id]))
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
        reported: Sequence[LeaseEnd] = tuple(self._pending)
        if not reported:
            return
        stale = await self._link.report(self._replica_id, tuple(end.event for end in reported))
        if stale is None:
            # until a poll has asked for adoption
            self._is_known.clear()
            self._has_news.set()
            return
        self._pending = [end for end in self._pending if end not in reported]


async def back_off(failures: int, error: DispatcherUnavailable) -> None:
    """Wait before the dispatcher is tried again, after so many failures before this one."""
    if failures == 0:
        logger.warning("the dispatcher cannot be reached (%s); trying again", error)
    await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])


def restored_state(
    lease: Lease, *, device: torch.device, arrival_s: float, deadline_s: float
) -> RequestState | None:
    """Return the state to go on from, if there is one and it can be read."""
    if lease.state is None:
        return None
    request = lease.request
    try:
        state = RequestState.from_bytes(
            lease.state, device=device, arrival_s=arrival_s, deadline_s=deadline_s
        )
        if state.request != request:
            raise ValueError(f"the state is of another request, {state.request.request_id}")
    except ValueError as error:
        with bound(**fields_of(request)):
            logger.warning(
                "the image starts over: its state is of no use (%s)",
                without_prompts(str(error), request),
            )
        return None
    return state


def returned(lease: Lease, state: RequestState | None) -> Returned:
    """Return the event that hands a lease back, with what has been done of it."""
    data = state.to_bytes() if state is not None else None
    steps_done = state.step_index if state is not None else 0
    return Returned(lease.request.request_id, lease.fence, data, steps_done)


def failure_of(request_id: str, error: RequestFailed | InvalidRequest) -> Failure:
    """Return what the client is told of an error."""
    if isinstance(error, InvalidRequest):
        return Failure(request_id, "invalid", error.message, "encode", error.param)
    return Failure(request_id, "error", error.message, error.stage)
