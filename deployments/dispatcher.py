"""The Dispatcher deployment: exactly one per cell.

Duties: own the dispatch service on its event loop; hand calls through; say whether it is well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ray_cluster.config import ClusterConfig
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.dispatch.state import ClusterSnapshot
from ray_cluster.leases import Outcome, Poll, PollReply, Registration, ReplicaEvent, Submission
from ray_cluster.requests import ImageRequest, ModelProfile


class Dispatcher:
    """A shim around :class:`DispatchService`; every method is the service's own."""

    def __init__(self, config: ClusterConfig) -> None:
        core = DispatchCore(
            limits=config.limits,
            config=config.dispatch,
            configured=[pool.model_name for pool in config.pools],
            # an epoch must be new in every life of the dispatcher
            epoch=time.time_ns(),
        )
        self._service = DispatchService(core, config=config.dispatch, clock=time.monotonic)

    async def submit(self, requests: Sequence[ImageRequest], wait_s: float) -> Submission:
        """See :meth:`DispatchService.submit`."""
        return await self._service.submit(requests, wait_s)

    async def close_admission(self) -> None:
        """See :meth:`DispatchService.close_admission`."""
        await self._service.close_admission()

    async def wait(self, request_ids: Sequence[str], timeout_s: float) -> dict[str, Outcome]:
        """See :meth:`DispatchService.wait`."""
        return await self._service.wait(request_ids, timeout_s)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See :meth:`DispatchService.abort`."""
        await self._service.abort(request_ids)

    async def models(self) -> dict[str, ModelProfile]:
        """See :meth:`DispatchService.models`."""
        return await self._service.models()

    async def register(self, registration: Registration) -> int:
        """See :meth:`DispatchService.register`."""
        return await self._service.register(registration)

    async def unregister(self, replica_id: str) -> None:
        """See :meth:`DispatchService.unregister`."""
        await self._service.unregister(replica_id)

    async def poll(self, poll: Poll) -> PollReply:
        """See :meth:`DispatchService.poll`."""
        return await self._service.poll(poll)

    async def report(self, replica_id: str, events: Sequence[ReplicaEvent]) -> tuple[str, ...]:
        """See :meth:`DispatchService.report`."""
        return await self._service.report(replica_id, events)

    async def snapshot(self) -> ClusterSnapshot:
        """See :meth:`DispatchService.snapshot`."""
        return await self._service.snapshot()

    async def check_health(self) -> None:
        """Raise when housekeeping has died, so that Serve starts a new dispatcher."""
        if not self._service.is_healthy:
            raise RuntimeError("the dispatcher's housekeeping task has died")
