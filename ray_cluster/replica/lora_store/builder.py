"""From the section of LoRAs to the skill of a store of them."""

from __future__ import annotations

from ray_cluster.config.slices import WorkerArguments
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.host import Host
from ray_cluster.replica.lora_store.folder import LoraFolder
from ray_cluster.replica.lora_store.processes import LoraThreads
from ray_cluster.replica.lora_store.skill import LoraStoreSkill, store_registration


def build(
    arguments: WorkerArguments, _settings: WorkerSettings | None, host: Host
) -> LoraStoreSkill:
    """Return the skill of a store; it has no settings."""
    workers = LoraThreads(host.making) if host.is_brief else None
    return LoraStoreSkill(
        store_registration(host.replica_id, host.node),
        LoraFolder(arguments.loras, workers=workers),
        link=host.link,
        clock=host.clock,
    )
