"""What the files of a pool's model say of it, before torch and diffusers are imported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.pools import PoolConfig
from ray_cluster.errors import ConfigError
from ray_cluster.models.builtin import builtin_folder
from ray_cluster.models.sizes import ModelSizes, model_sizes
from ray_cluster.policies.reuse import num_outer_blocks
from ray_cluster.requests import FLOW_SAMPLER_NAMES, SamplerName, noise_samplers


@dataclass(frozen=True, slots=True)
class LocalModel:
    """What is known of a model that is built in or in a folder of this machine."""

    sizes: ModelSizes
    samplers: Sequence[SamplerName]


def local_model(pool: PoolConfig) -> LocalModel | None:
    """Return what a pool's model can do, as far as it can be told here.

    Returns:
        None where its files cannot be read: it is not downloaded, or is elsewhere, or is damaged.

    Raises:
        ConfigError: there cannot be a model of that name, or the pool's sizes or its sampler do
            not suit it.
    """
    folder = builtin_folder(pool.model) or Path(pool.model).expanduser()
    if "/" not in pool.model and not folder.is_dir():
        raise no_such_model(pool.model)
    is_flow = (folder / "transformer").is_dir()
    try:
        model, vae, scheduler = (
            json.loads((folder / name).read_text(encoding="utf-8"))
            for name in (
                f"{'transformer' if is_flow else 'unet'}/config.json",
                "vae/config.json",
                "scheduler/scheduler_config.json",
            )
        )
        sizes = model_sizes(pool, model, vae)
        predicts = scheduler.get("prediction_type", "epsilon")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    samplers = FLOW_SAMPLER_NAMES if is_flow else noise_samplers(predicts)
    check_sampler(pool, samplers)
    check_schedules(pool, num_outer_blocks(model))
    return LocalModel(sizes, samplers)


def check_models(config: ClusterConfig) -> None:
    """Check the pools of a configuration against their models; errors as of :func:`local_model`."""
    for pool in config.pools:
        local_model(pool)


def no_such_model(model: str) -> ConfigError:
    """Return the error for what names no model."""
    return ConfigError(
        f"model {model!r} is neither a built-in name, nor a diffusers folder that exists, "
        "nor a hub id of the form owner/name"
    )


def check_sampler(pool: PoolConfig, offered: Sequence[SamplerName]) -> None:
    """Refuse a pool whose default sampler its model does not offer.

    Raises:
        ConfigError: it names those that are offered.
    """
    given = pool.defaults.sampler
    if given is not None and given not in offered:
        raise ConfigError(
            f"pool {pool.name}: defaults.sampler is {given}, which this model does not offer; "
            f"allowed: {', '.join(offered)}"
        )


def check_schedules(pool: PoolConfig, outer_blocks: range) -> None:
    """Refuse a pool whose fidelity table has a reuse schedule that its model cannot run.

    Raises:
        ConfigError: it says what is allowed.
    """
    table = None if pool.fidelity is None else pool.fidelity.table()
    for schedule in () if table is None else table.schedules:
        if schedule.num_outer not in outer_blocks:
            raise ConfigError(
                f"pool {pool.name}: fidelity has the reuse schedule {schedule}, but this model can "
                f"compute {outer_blocks.start} to {outer_blocks.stop - 1} outer blocks; change it, "
                "or have the table measured by models calibrate"
            )
