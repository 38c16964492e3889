"""The LoraStore deployment: one process a node that fetches LoRAs for its replicas.

Duties: keep the folder of its node; all others are any worker's. It needs no GPU.
"""

from __future__ import annotations

import time

from ray import serve
from ray.util import get_node_ip_address

from ray_cluster.config.arguments import LoraStoreArguments
from ray_cluster.config.loading import set_environment
from ray_cluster.deployments.actors import set_up_actor_logs
from ray_cluster.deployments.dispatcher_handle import DispatcherHandle
from ray_cluster.deployments.serve.ray_environment import MODEL_ENVIRONMENT
from ray_cluster.deployments.worker import WorkerDeployment


class LoraStore(WorkerDeployment):
    """One replica: one folder."""

    # Serve awaits the constructor on the event loop that the worker needs
    async def __init__(self, arguments: LoraStoreArguments) -> None:  # type: ignore[misc]
        set_up_actor_logs(arguments.logs)
        # of the process that converts
        set_environment(MODEL_ENVIRONMENT)
        # not above: who only deploys this class needs none of it
        from ray_cluster.replica.lora_store.folder import LoraFolder
        from ray_cluster.replica.lora_store.skill import LoraStoreSkill, store_registration

        replica_id = serve.get_replica_context().replica_id.unique_id
        skill = LoraStoreSkill(
            store_registration(replica_id, get_node_ip_address()),
            LoraFolder(arguments.loras),
            link=DispatcherHandle(patience_s=arguments.patience_s).link,
            clock=time.monotonic,
        )
        self._begin(skill)
