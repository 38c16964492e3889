"""The ControlNet deployment: n replicas of one ControlNet, which all replicas of its bases share.

Duties: fetch the settings, load and measure the ControlNet, run its agent; all others are a
worker's. No step goes through Serve or the dispatcher: bases' replicas connect to its endpoint.
"""

from __future__ import annotations

import time

from ray import serve
from ray.util import get_node_ip_address

from ray_cluster.config.slices import WorkerArguments
from ray_cluster.deployments.actors import set_up_actor_logs
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.worker import Worker, loading


class ControlNet(Worker):
    """One replica: one ControlNet, one agent."""

    # Serve awaits the constructor on the event loop that the agent needs
    async def __init__(self, arguments: WorkerArguments) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        link = DispatcherHandle(patience_s=arguments.dispatch.patience_s).link
        async with loading(arguments.name):
            # not above: who only deploys this class needs none of the model libraries
            from ray_cluster.replica.controlnet.builder import build_controlnet
            from ray_cluster.replica.denoise.builder import first_settings

            agent = build_controlnet(
                arguments,
                await first_settings(link, arguments.name),
                replica_id=serve.get_replica_context().replica_id.unique_id,
                node=get_node_ip_address(),
                link=link,
                clock=time.monotonic,
            )
        self._begin(agent)
