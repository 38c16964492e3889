"""The BaseModel deployment: n replicas of one model.

Duties: fetch the settings, load the model and measure a step, run the replica agent; all others are
a worker's. It pulls its work from the dispatcher.
"""

from __future__ import annotations

import asyncio
import time

from ray import serve
from ray.util import get_node_ip_address

from ray_cluster.config.slices import WorkerArguments
from ray_cluster.deployments.actors import refuse_local_storage, set_up_actor_logs
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.worker import Worker, loading
from ray_cluster.imaging.processes.image_coder import ImageCoder


class BaseModel(Worker):
    """One replica: one model, one engine, one agent."""

    # Serve awaits the constructor on the event loop that the agent needs
    async def __init__(self, arguments: WorkerArguments) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        await asyncio.to_thread(refuse_local_storage, arguments.storage, has_jobs=False)
        link = DispatcherHandle(patience_s=arguments.dispatch.patience_s).link
        # the images in flight bound what waits
        coder = ImageCoder(max_waiting_bytes=None)
        async with loading(arguments.name):
            # not above: who only deploys this class needs none of the model libraries
            from ray_cluster.replica.denoise.builder import build_agent, first_settings

            agent = build_agent(
                arguments,
                await first_settings(link, arguments.name),
                replica_id=serve.get_replica_context().replica_id.unique_id,
                node=get_node_ip_address(),
                coder=coder,
                link=link,
                clock=time.monotonic,
            )
        self._begin(agent, close=coder.close)
