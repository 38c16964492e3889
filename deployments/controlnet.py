"""The ControlNet deployment: n replicas of one ControlNet, which all replicas of its bases share.

Duties: fetch the settings, load and measure the ControlNet; all others are any worker's. No
step goes through Serve or the dispatcher: bases' replicas connect to its endpoint.
"""

from __future__ import annotations

import time

from ray import serve
from ray.util import get_node_ip_address

from ray_cluster.cell.worker import first_settings
from ray_cluster.config.arguments import ControlNetWorkerArguments
from ray_cluster.deployments.actors import set_up_actor_logs
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.worker import WorkerDeployment, loading


class ControlNet(WorkerDeployment):
    """One replica: one ControlNet."""

    # Serve awaits the constructor on the event loop that the worker needs
    async def __init__(self, arguments: ControlNetWorkerArguments) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        link = DispatcherHandle(patience_s=arguments.patience_s).link
        async with loading(arguments.controlnet.name):
            # not above: who only deploys this class needs none of the model libraries
            from ray_cluster.replica.controlnet.builder import build_controlnet

            skill = build_controlnet(
                arguments,
                await first_settings(link, arguments.controlnet.name),
                replica_id=serve.get_replica_context().replica_id.unique_id,
                node=get_node_ip_address(),
                link=link,
                clock=time.monotonic,
            )
        self._begin(skill)
