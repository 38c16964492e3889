"""The deployment of every kind of worker: n replicas that pull their work from the dispatcher.

Duties: fetch the settings; load what the kind needs, when it is its turn; pass metrics on to Ray;
report health; release all leases when Serve stops the replica, or on SIGTERM. No Serve call is ever
in flight on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import ray
from ray import serve
from ray.util import get_node_ip_address

from ray_cluster.cell.kinds import build_skill
from ray_cluster.cell.worker import Worker, first_settings
from ray_cluster.config.kinds import KINDS
from ray_cluster.config.loading import set_environment
from ray_cluster.config.slices import WorkerArguments
from ray_cluster.deployments.actors import RayMetrics, refuse_local_storage, set_up_actor_logs
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.ranks import rank_starter
from ray_cluster.deployments.serve.ray_environment import ALLOCATOR_ENVIRONMENT, MODEL_ENVIRONMENT
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.process.gc_freeze import uncollected
from ray_cluster.process.load_turns import LoadTurns
from ray_cluster.process.sigterm import TerminationNotice
from ray_cluster.replica.group.processes import start_child
from ray_cluster.replica.host import Host

logger = logging.getLogger(__name__)


class WorkerDeployment:
    """One replica: one worker, of the kind that its arguments say."""

    # Serve awaits the constructor on the event loop that the worker needs
    async def __init__(self, arguments: WorkerArguments) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        row = KINDS[arguments.kind]
        if "storage" in row.also_reads:
            await asyncio.to_thread(refuse_local_storage, arguments.storage, has_jobs=False)
        link = DispatcherHandle(patience_s=arguments.dispatch.patience_s).link
        # the images in flight bound what waits
        self._coder = ImageCoder(max_waiting_bytes=None)
        host = Host(
            serve.get_replica_context().replica_id.unique_id,
            get_node_ip_address(),
            link,
            self._coder,
            start_rank=rank_starter(arguments.pools[0]) if arguments.is_group else start_child,
        )
        if row.has_model:
            async with _loading(arguments.name):
                # not before: those of a turn that is minutes away may be others
                skill = build_skill(arguments, await first_settings(link, arguments.name), host)
        else:
            # of the processes that it starts
            set_environment(MODEL_ENVIRONMENT)
            settings = None if row.is_light else await first_settings(link, arguments.name)
            skill = build_skill(arguments, settings, host)
        self._worker = Worker(skill)
        self._leaving: asyncio.Task[None] | None = None
        self._worker.start()
        self._ray_metrics = RayMetrics(self._snapshot)
        self._ray_metrics.start()
        self._notice = TerminationNotice(self._on_sigterm)

    def _on_sigterm(self) -> None:
        logger.warning("SIGTERM: this replica releases its leases, and ends")
        self._leave().add_done_callback(_exit)

    def _leave(self) -> asyncio.Task[None]:
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._release())
        return self._leaving

    async def _release(self) -> None:
        await self._worker.drain()
        self._coder.close()

    async def _snapshot(self) -> Snapshot:
        return self._worker.metrics()

    async def check_health(self) -> None:
        """Raise when a thread or task has died or a piece of work hangs: Serve replaces it."""
        self._worker.check_alive()

    async def __del__(self) -> None:
        """Release all leases; Serve calls and awaits this on scale-down and shutdown."""
        if hasattr(self, "_notice"):
            await self._leave()


@asynccontextmanager
async def _loading(application: str) -> AsyncIterator[None]:
    """Wait for this process's turn to import the model libraries and load a model, and have it."""
    context = ray.get_runtime_context()
    session = Path(context.get_temp_dir()) / context.get_session_name()
    set_environment(ALLOCATOR_ENVIRONMENT)
    async with LoadTurns.of_this_machine(session / "loading").turn(application):
        with uncollected():
            yield


def _exit(_leaving: asyncio.Task[None]) -> None:
    # os._exit calls no handler of the end
    logging.shutdown()
    os._exit(0)
