"""The Discriminator deployment: n replicas of one scorer of images.

Duties: fetch the settings, load and measure the scorer; all others are any worker's.
"""

from __future__ import annotations

import time

from ray import serve
from ray.util import get_node_ip_address

from ray_cluster.cell.worker import first_settings
from ray_cluster.config.arguments import ScorerArguments
from ray_cluster.deployments.actors import set_up_actor_logs
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.worker import WorkerDeployment, loading


class Discriminator(WorkerDeployment):
    """One replica: one scorer."""

    # Serve awaits the constructor on the event loop that the worker needs
    async def __init__(self, arguments: ScorerArguments) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        link = DispatcherHandle(patience_s=arguments.patience_s).link
        async with loading(arguments.discriminator.name):
            # not above: who only deploys this class needs none of the model libraries
            from ray_cluster.replica.score.builder import build_scorer

            skill = build_scorer(
                arguments,
                await first_settings(link, arguments.discriminator.name),
                replica_id=serve.get_replica_context().replica_id.unique_id,
                node=get_node_ip_address(),
                link=link,
                clock=time.monotonic,
            )
        self._begin(skill)
