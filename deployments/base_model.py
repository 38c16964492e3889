"""The BaseModel deployment: n replicas of one model.

Duties: fetch the settings, load the model and measure a step; all others are any worker's. It
pulls its work from the dispatcher.
"""

from __future__ import annotations

import asyncio
import time

from ray import serve
from ray.util import get_node_ip_address

from ray_cluster.cell.worker import first_settings
from ray_cluster.config.arguments import WorkerArguments
from ray_cluster.deployments.actors import refuse_local_storage, set_up_actor_logs
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.worker import WorkerDeployment, loading
from ray_cluster.imaging.processes.image_coder import ImageCoder


class BaseModel(WorkerDeployment):
    """One replica: one model, one engine."""

    # Serve awaits the constructor on the event loop that the worker needs
    async def __init__(self, arguments: WorkerArguments) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        await asyncio.to_thread(refuse_local_storage, arguments.storage)
        link = DispatcherHandle(patience_s=arguments.patience_s).link
        # the images in flight bound what waits
        coder = ImageCoder(max_waiting_bytes=None)
        async with loading(arguments.pool.name):
            # not above: who only deploys this class needs none of the model libraries
            from ray_cluster.replica.denoise.builder import build_denoiser

            skill = build_denoiser(
                arguments,
                await first_settings(link, arguments.pool.name),
                replica_id=serve.get_replica_context().replica_id.unique_id,
                node=get_node_ip_address(),
                coder=coder,
                link=link,
                clock=time.monotonic,
            )
        self._begin(skill, close=coder.close)
