"""Arguments of the Serve applications: their parts of a configuration, without settings.

They do not change while an application runs, so a new API key, limit or pool makes Serve replace
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, SecretStr

from ray_cluster.config.loading import ClusterConfig, environment_keys
from ray_cluster.config.sections.cascades import DiscriminatorArguments
from ray_cluster.config.sections.cell_wide import (
    DispatchArguments,
    LogsConfig,
    Section,
    StorageArguments,
)
from ray_cluster.config.sections.controller import ControlArguments, Scaling
from ray_cluster.config.sections.controlnets import ControlNetArguments
from ray_cluster.config.sections.http import HttpArguments
from ray_cluster.config.sections.loras import LoraArguments
from ray_cluster.config.sections.pools import PoolArguments
from ray_cluster.config.sections.preprocessors import PreprocessorsConfig
from ray_cluster.config.settings import part_of
from ray_cluster.errors import without_password

# of the front's arguments
_COMPARED = {"http", "dispatch", "storage", "loras", "preprocessors", "logs", "control"}


class FrontArguments(Section):
    """Arguments of the dispatcher and the gateways.

    Attributes:
        settings: path of the watched configuration file where the dispatcher runs; None if the
            settings given at the start stay.
        folder: where relative paths of the file's storage start; None where there are none.
        overridden: keys that options set, whatever the file says.
        api_keys: of the environment at the deployment, added to the file's.
    """

    http: HttpArguments = HttpArguments()
    dispatch: DispatchArguments = DispatchArguments()
    storage: StorageArguments = StorageArguments()
    loras: LoraArguments = LoraArguments()
    preprocessors: PreprocessorsConfig = PreprocessorsConfig()
    logs: LogsConfig = LogsConfig()
    control: ControlArguments = ControlArguments()
    settings: str | None = None
    folder: str | None = None
    overridden: tuple[str, ...] = ()
    api_keys: tuple[SecretStr, ...] = ()


class WorkerArguments(Section):
    """Arguments of the replicas of a pool.

    Attributes:
        controlnets: those that they run themselves.
    """

    pool: PoolArguments
    storage: StorageArguments = StorageArguments()
    loras: LoraArguments = LoraArguments()
    controlnets: tuple[ControlNetArguments, ...] = ()
    logs: LogsConfig = LogsConfig()
    patience_s: float = Field(DispatchArguments().patience_s, gt=0)


class LoraStoreArguments(Section):
    """Arguments of the stores of LoRAs."""

    loras: LoraArguments = LoraArguments()
    logs: LogsConfig = LogsConfig()
    patience_s: float = Field(DispatchArguments().patience_s, gt=0)


class ControllerArguments(Section):
    """Arguments of the controller."""

    scaling: Scaling = "endpoint"
    logs: LogsConfig = LogsConfig()
    patience_s: float = Field(DispatchArguments().patience_s, gt=0)


class ScorerArguments(Section):
    """Arguments of the replicas of a discriminator."""

    discriminator: DiscriminatorArguments
    logs: LogsConfig = LogsConfig()
    patience_s: float = Field(DispatchArguments().patience_s, gt=0)


class ControlNetWorkerArguments(Section):
    """Arguments of the replicas of a ControlNet."""

    controlnet: ControlNetArguments
    logs: LogsConfig = LogsConfig()
    patience_s: float = Field(DispatchArguments().patience_s, gt=0)


def front_arguments(
    config: ClusterConfig,
    settings: Path | str | None = None,
    *,
    folder: Path | None = None,
    overridden: tuple[str, ...] = (),
) -> FrontArguments:
    """Return the front's part of a configuration; arguments as of :class:`FrontArguments`."""
    return FrontArguments(
        http=part_of(config.http, HttpArguments),
        dispatch=part_of(config.dispatch, DispatchArguments),
        storage=part_of(config.storage, StorageArguments),
        loras=part_of(config.loras, LoraArguments),
        preprocessors=config.preprocessors,
        logs=config.logs,
        control=part_of(config.control, ControlArguments),
        settings=None if settings is None else str(Path(settings).absolute()),
        folder=None if folder is None else str(folder),
        overridden=overridden,
        api_keys=tuple(SecretStr(key) for key in environment_keys()),
    )


def worker_arguments(config: ClusterConfig, name: str) -> WorkerArguments:
    """Return a pool's part; raises :class:`ConfigError` if there is no such pool."""
    pool = config.pool(name)
    return WorkerArguments(
        pool=part_of(pool, PoolArguments),
        storage=part_of(config.storage, StorageArguments),
        loras=part_of(config.loras, LoraArguments),
        controlnets=tuple(
            part_of(one, ControlNetArguments)
            for one in config.controlnets
            if one.mode == "local" and pool.model_name in one.bases
        ),
        logs=config.logs,
        patience_s=config.dispatch.patience_s,
    )


def lora_store_arguments(config: ClusterConfig) -> LoraStoreArguments:
    """Return the part of the stores of LoRAs."""
    return LoraStoreArguments(
        loras=part_of(config.loras, LoraArguments),
        logs=config.logs,
        patience_s=config.dispatch.patience_s,
    )


def controller_arguments(config: ClusterConfig) -> ControllerArguments:
    """Return the controller's part."""
    return ControllerArguments(
        scaling=config.control.scaling,
        logs=config.logs,
        patience_s=config.dispatch.patience_s,
    )


def scorer_arguments(config: ClusterConfig, name: str) -> ScorerArguments:
    """Return a discriminator's part; raises :class:`ConfigError` if there is none of that name."""
    return ScorerArguments(
        discriminator=part_of(config.discriminator(name), DiscriminatorArguments),
        logs=config.logs,
        patience_s=config.dispatch.patience_s,
    )


def controlnet_arguments(config: ClusterConfig, name: str) -> ControlNetWorkerArguments:
    """Return a ControlNet's part; raises :class:`ConfigError` if there is none of that name."""
    return ControlNetWorkerArguments(
        controlnet=part_of(config.controlnet(name), ControlNetArguments),
        logs=config.logs,
        patience_s=config.dispatch.patience_s,
    )


def needs_redeploy(
    running: FrontArguments,
    workers: Mapping[str, PoolArguments | DiscriminatorArguments | ControlNetArguments],
    wanted: ClusterConfig,
) -> list[str]:
    """Return what of a configuration differs from what runs, and needs a redeploy.

    Args:
        running: of the front.
        workers: of the running pools, discriminators and ControlNets that are known.
    """
    front = front_arguments(wanted).model_dump(include=_COMPARED)
    known = running.model_dump(include=set(front))
    found = [
        f"front {key} ({without_password(old)} runs, the file has {without_password(new)})"
        for key, old, new in _differences(known, front)
        if key not in running.overridden
    ]
    for worker in wanted.workers:
        if (before := workers.get(worker.name)) is not None:
            after = part_of(worker, type(before))
            found += [
                f"{wanted.title(worker.name)} {key} ({old} runs, the file has {new})"
                for key, old, new in _differences(before.model_dump(), after.model_dump())
            ]
    return found


def outranked(running: FrontArguments, wanted: ClusterConfig) -> list[str]:
    """Return what of a configuration differs from what runs because an option was given."""
    front = front_arguments(wanted).model_dump(include=_COMPARED)
    known = running.model_dump(include=set(front))
    return [
        f"{key} ({without_password(old)} runs, the file has {without_password(new)})"
        for key, old, new in _differences(known, front)
        if key in running.overridden
    ]


def replicas_key(pool: str) -> str:
    """Return how :attr:`FrontArguments.overridden` names a pool's number of replicas."""
    return f"pools.{pool}.replicas"


def _differences(
    old: Mapping[str, Any], new: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    for name, value in new.items():
        if isinstance(value, dict):
            yield from _differences(old[name], value, f"{path}{name}.")
        elif value != old[name]:
            yield f"{path}{name}", old[name], value
