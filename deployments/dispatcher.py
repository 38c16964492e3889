"""The Dispatcher deployment: exactly one per cell.

Duties: own the dispatch and job services on its event loop; take up the jobs that are open; delete
the states that no replica deletes, and the inputs that no request uses; let gateways and replicas
call it, without Serve in between; pass its metrics on to Ray; say whether it is well, and whether
its files are where the other nodes find them.
"""

from __future__ import annotations

import asyncio
import time

from ray.util import get_node_ip_address

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.deployments.actor_logs import set_up_actor_logs
from ray_cluster.deployments.node_watch import NodeWatch, refuse_local_storage
from ray_cluster.deployments.ray_metrics import RayMetrics
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.dispatch.snapshots import ClusterSnapshot
from ray_cluster.dispatch.state_sweeper import StateSweeper
from ray_cluster.jobs.cell import CellService
from ray_cluster.jobs.service import JobService
from ray_cluster.jobs.sql_store import SqlJobStore
from ray_cluster.observability.metrics_book import MetricsBook
from ray_cluster.protocol.dispatcher import CellCalls, DispatcherLink, ImageCalls, JobCalls
from ray_cluster.protocol.leases import Registration
from ray_cluster.protocol.rpc import RpcAddress, RpcServer
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore

# of a process that tells its metrics every few seconds
_SILENCE_S = 30.0


class Dispatcher:
    """Holds the services of a cell, and lets others call them."""

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
        book = MetricsBook(_SILENCE_S)
        self._service = DispatchService(
            core,
            config=config.dispatch,
            clock=time.monotonic,
            on_outcome=self._states.on_outcome,
            on_metrics=lambda replica, own: book.update(replica, own, time.monotonic()),
            on_register=self._note_worker,
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
        cell = CellService(self._service, self._jobs, book, time.monotonic)
        self._ray_metrics = RayMetrics(cell.own_metrics)
        await self._jobs.start()
        # not before the open jobs are known
        self._states.start()
        self._ray_metrics.start()
        self._nodes = NodeWatch(config.storage)
        self._nodes.start()
        self._server = RpcServer(
            {
                ImageCalls: self._service,
                JobCalls: self._jobs,
                CellCalls: cell,
                DispatcherLink: self._service,
            }
        )
        self._address = await self._server.start(get_node_ip_address(), config.dispatch.port)

    def _note_worker(self, registration: Registration) -> None:
        self._jobs.note_worker(registration)

    async def address(self) -> RpcAddress:
        """Return where this dispatcher listens."""
        return self._address

    async def close_admission(self) -> None:
        """See :meth:`DispatchService.close_admission`."""
        await self._service.close_admission()

    async def end_attached(self) -> None:
        """See :meth:`DispatchService.end_attached`."""
        await self._service.end_attached()

    async def snapshot(self) -> ClusterSnapshot:
        """See :meth:`DispatchService.snapshot`."""
        return await self._service.snapshot()

    async def check_health(self) -> None:
        """Raise when housekeeping has died, so that Serve starts a new dispatcher."""
        if not self._service.is_healthy:
            raise RuntimeError("the dispatcher's housekeeping task has died")
