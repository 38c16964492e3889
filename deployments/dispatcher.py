"""The Dispatcher deployment: exactly one per cell.

Duties: own the dispatch and job services on its event loop; take up the jobs that are open; delete
the states that no replica deletes, and the inputs that no request uses; let gateways and replicas
call it, without Serve in between; pass its metrics on to Ray; say whether it is well, and whether
its files are where the other nodes find them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ray.util import get_node_ip_address

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.deployments.actor_logs import set_up_actor_logs
from ray_cluster.deployments.node_watch import NodeWatch, refuse_local_storage
from ray_cluster.deployments.ray_metrics import RayMetrics
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.metrics import cell_snapshot
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.dispatch.snapshots import ClusterSnapshot
from ray_cluster.dispatch.state_sweeper import StateSweeper
from ray_cluster.jobs.service import JobService
from ray_cluster.jobs.sql_store import SqlJobStore
from ray_cluster.observability.metrics_book import MetricsBook
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.jobs import Creation, Job, JobQuery, JobView
from ray_cluster.protocol.leases import Poll, PollReply, Registration, ReplicaEvent, Shown
from ray_cluster.protocol.outcomes import Outcome, Sight, Submission
from ray_cluster.protocol.rpc import Method, RpcAddress, RpcServer
from ray_cluster.requests import ImageRequest, ModelProfile
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore

# of a process that tells its metrics every few seconds
_SILENCE_S = 30.0


class Dispatcher:
    """A shim around :class:`DispatchService` and :class:`JobService`, whose methods these are."""

    # Serve awaits the constructor: nothing is asked of a dispatcher before its jobs are back
    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        set_up_actor_logs(config.logs)
        await asyncio.to_thread(refuse_local_storage, config.storage)
        core = DispatchCore(
            limits=config.limits,
            config=config.dispatch,
            configured=[pool.model_name for pool in config.pools],
            # an epoch must be new in every life of the dispatcher
            epoch=time.time_ns(),
        )
        self._states = StateSweeper(
            await asyncio.to_thread(BlobStore, config.storage.states),
            knows=core.knows,
            note_kept=core.note_kept,
            wall_clock=time.time,
        )
        self._service = DispatchService(
            core,
            config=config.dispatch,
            clock=time.monotonic,
            on_outcome=self._states.on_outcome,
        )
        self._jobs = JobService(
            self._service,
            await asyncio.to_thread(SqlJobStore.open, config.storage.jobs),
            await asyncio.to_thread(BlobStore, config.storage.results),
            InputStore(
                await asyncio.to_thread(BlobStore, config.storage.inputs),
                grace_s=config.storage.inputs_grace_s,
                wall_clock=time.time,
            ),
            config=config.storage,
            max_open_per_client=config.limits.max_open_jobs_per_client,
            wall_clock=time.time,
        )
        self._book = MetricsBook(_SILENCE_S)
        self._ray_metrics = RayMetrics(self._own_metrics)
        await self._jobs.start()
        # not before the open jobs are known
        self._states.start()
        self._ray_metrics.start()
        self._nodes = NodeWatch(config.storage)
        self._nodes.start()
        self._server = RpcServer(self._methods())
        self._address = await self._server.start(get_node_ip_address(), config.dispatch.port)

    def _methods(self) -> list[Method]:
        """What gateways and replicas call without Serve between them."""
        return [
            *(self.submit, self.wait, self.watch, self.abort, self.models, self.warnings),
            *(self.create_job, self.job, self.job_change, self.jobs, self.cancel_job),
            *(self.metrics, self.tell_metrics),
            *(self.register, self.unregister, self.poll, self.report, self.show),
        ]

    async def address(self) -> RpcAddress:
        """Return where this dispatcher listens."""
        return self._address

    async def submit(
        self, requests: Sequence[ImageRequest], wait_s: float, client: str
    ) -> Submission:
        """See :meth:`DispatchService.submit`."""
        return await self._service.submit(requests, wait_s, client)

    async def close_admission(self) -> None:
        """See :meth:`DispatchService.close_admission`."""
        await self._service.close_admission()

    async def end_attached(self) -> None:
        """See :meth:`DispatchService.end_attached`."""
        await self._service.end_attached()

    async def wait(self, request_ids: Sequence[str], timeout_s: float) -> dict[str, Outcome]:
        """See :meth:`DispatchService.wait`."""
        return await self._service.wait(request_ids, timeout_s)

    async def watch(self, request_id: str, seen: int, timeout_s: float) -> Sight:
        """See :meth:`DispatchService.watch`."""
        return await self._service.watch(request_id, seen, timeout_s)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See :meth:`DispatchService.abort`."""
        await self._service.abort(request_ids)

    async def create_job(self, job: Job) -> Creation:
        """See :meth:`JobService.create`."""
        return await self._jobs.create(job)

    async def job(self, client: str, job_id: str, wait_s: float) -> JobView | None:
        """See :meth:`JobService.get`."""
        return await self._jobs.get(client, job_id, wait_s)

    async def job_change(
        self, client: str, job_id: str, seen: str, wait_s: float
    ) -> JobView | None:
        """See :meth:`JobService.change`."""
        return await self._jobs.change(client, job_id, seen, wait_s)

    async def jobs(self, query: JobQuery) -> list[JobView]:
        """See :meth:`JobService.page`."""
        return await self._jobs.page(query)

    async def cancel_job(self, client: str, job_id: str) -> JobView | None:
        """See :meth:`JobService.cancel`."""
        return await self._jobs.cancel(client, job_id)

    async def metrics(self, process_id: str, own: Snapshot) -> Snapshot:
        """Return the metrics of the whole cell, the caller's present ones included."""
        await self.tell_metrics(process_id, own)
        return self._book.merged(time.monotonic(), await self._own_metrics())

    async def _own_metrics(self) -> Snapshot:
        return cell_snapshot(await self._service.snapshot(), self._jobs.num_open)

    async def tell_metrics(self, process_id: str, own: Snapshot) -> None:
        """Take in a gateway's present metrics."""
        self._book.update(process_id, own, time.monotonic())

    async def warnings(self) -> tuple[str, ...]:
        """Return what is wrong though calls are answered."""
        return (*(await self._service.snapshot()).warnings, *self._jobs.warnings)

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
        if poll.metrics is not None:
            self._book.update(poll.replica_id, poll.metrics, time.monotonic())
        return await self._service.poll(poll)

    async def report(
        self, replica_id: str, events: Sequence[ReplicaEvent]
    ) -> tuple[str, ...] | None:
        """See :meth:`DispatchService.report`."""
        return await self._service.report(replica_id, events)

    async def show(self, replica_id: str, shown: Shown) -> None:
        """See :meth:`DispatchService.show`."""
        await self._service.show(replica_id, shown)

    async def snapshot(self) -> ClusterSnapshot:
        """See :meth:`DispatchService.snapshot`."""
        return await self._service.snapshot()

    async def check_health(self) -> None:
        """Raise when housekeeping has died, so that Serve starts a new dispatcher."""
        if not self._service.is_healthy:
            raise RuntimeError("the dispatcher's housekeeping task has died")
