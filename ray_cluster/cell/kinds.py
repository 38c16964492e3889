"""Builds the skill of each kind of worker."""

from __future__ import annotations

from importlib import import_module

from ray_cluster.config.kinds import CALLS_BUILDER, GROUP_BUILDER, KINDS
from ray_cluster.config.slices import WorkerArguments
from ray_cluster.engine.files.folders import is_called
from ray_cluster.process.gc_freeze import uncollected
from ray_cluster.protocol.settings import WorkerSettings
from ray_cluster.replica.host import Host
from ray_cluster.replica.skill import Skill


def build_skill(arguments: WorkerArguments, settings: WorkerSettings | None, host: Host) -> Skill:
    """Load what a worker needs, measure it, and return its skill, not yet started.

    Args:
        settings: what it starts with; None for the defaults.

    Raises:
        ConfigError, ModelUnsupported, MemoryRefused: it cannot be loaded.
    """
    # not above: torch and the model libraries take seconds, and not every kind needs them
    with uncollected():
        name = GROUP_BUILDER if arguments.is_group else KINDS[arguments.kind].builder
        if arguments.kind == "denoise" and not arguments.is_group and is_called(arguments.pools[0]):
            name = CALLS_BUILDER
        builder = import_module(name)
    skill: Skill = builder.build(arguments, settings, host)
    return skill
