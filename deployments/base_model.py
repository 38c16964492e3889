"""The BaseModel deployment: n replicas of one model.

Duties: fetch the settings, load the model and measure a step; run the replica agent on the event
loop; report health by the step thread's heartbeat; pass metrics on to Ray; release all leases when
Serve stops the replica, or on SIGTERM. No Serve call is ever in flight on it: it pulls its work
from the dispatcher.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

from ray import serve
from ray.util import get_node_ip_address

from ray_cluster.config.arguments import WorkerArguments
from ray_cluster.config.loading import set_environment
from ray_cluster.deployments.actors import RayMetrics, refuse_local_storage, set_up_actor_logs
from ray_cluster.deployments.links import DispatcherHandle
from ray_cluster.deployments.ray_environment import ALLOCATOR_ENVIRONMENT
from ray_cluster.imaging.encoder import ImageCoder
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.process.gc_freeze import uncollected
from ray_cluster.process.sigterm import TerminationNotice

logger = logging.getLogger(__name__)


class BaseModel:
    """One replica: one model, one engine, one agent."""

    # Serve awaits the constructor on the event loop that the agent needs
    async def __init__(self, arguments: WorkerArguments) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        await asyncio.to_thread(refuse_local_storage, arguments.storage)
        link = DispatcherHandle(patience_s=arguments.patience_s).link
        self._coder = ImageCoder()
        set_environment(ALLOCATOR_ENVIRONMENT)
        with uncollected():
            # not above: who only deploys this class needs none of the model libraries
            from ray_cluster.replica.builder import build_agent, first_settings

            self._agent = build_agent(
                arguments,
                await first_settings(link, arguments.pool.name),
                replica_id=serve.get_replica_context().replica_id.unique_id,
                node=get_node_ip_address(),
                coder=self._coder,
                link=link,
                clock=time.monotonic,
            )
        self._leaving: asyncio.Task[None] | None = None
        self._agent.start()
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
        await self._agent.drain()
        self._coder.close()

    async def _snapshot(self) -> Snapshot:
        return self._agent.metrics()

    async def check_health(self) -> None:
        """Raise when a thread or task has died or a step hangs, so that Serve replaces it."""
        self._agent.check_alive()

    async def __del__(self) -> None:
        """Release all leases; Serve calls and awaits this on scale-down and shutdown."""
        if hasattr(self, "_notice"):
            await self._leave()


def _exit(_leaving: asyncio.Task[None]) -> None:
    # os._exit calls no handler of the end
    logging.shutdown()
    os._exit(0)
