"""What every deployment that pulls its work from the dispatcher does.

Duties: load a model when it is its turn; pass metrics on to Ray; report health; release all leases
when Serve stops the replica, or on SIGTERM. No Serve call is ever in flight on it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import ray

from ray_cluster.cell.worker import Worker
from ray_cluster.config.loading import set_environment
from ray_cluster.deployments.actors import RayMetrics
from ray_cluster.deployments.serve.ray_environment import ALLOCATOR_ENVIRONMENT
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.process.gc_freeze import uncollected
from ray_cluster.process.load_turns import LoadTurns
from ray_cluster.process.sigterm import TerminationNotice
from ray_cluster.replica.skill import Skill

logger = logging.getLogger(__name__)


class WorkerDeployment:
    """Runs one worker from :meth:`_begin` on; its constructor is the deployment's own."""

    def _begin(self, skill: Skill, close: Callable[[], None] = lambda: None) -> None:
        """Start a worker.

        Args:
            close: called once it is drained.
        """
        self._worker = Worker(skill)
        self._close = close
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
        self._close()

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
async def loading(application: str) -> AsyncIterator[None]:
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
