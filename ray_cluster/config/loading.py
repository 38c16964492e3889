"""The configuration: one YAML file, validated. The environment is read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from ray_cluster.config.sections.cascades import CascadeConfig, DiscriminatorConfig, check_cascades
from ray_cluster.config.sections.cell_wide import (
    DispatchConfig,
    LimitsConfig,
    LogsConfig,
    RayConfig,
    Section,
    StorageConfig,
)
from ray_cluster.config.sections.controller import ControlConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig, check_controlnets
from ray_cluster.config.sections.http import HttpConfig
from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.config.sections.pools import RESERVED_NAMES, PoolConfig
from ray_cluster.config.sections.preprocessors import PreprocessorsConfig
from ray_cluster.config.validation_errors import describe
from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.errors import ConfigError

_API_KEYS_VARIABLE = "RAY_CLUSTER_API_KEYS"
_OWN_KEY_VARIABLE = "RAY_CLUSTER_API_KEY"


class ClusterConfig(Section):
    """The whole configuration of one cell."""

    http: HttpConfig = HttpConfig()
    ray: RayConfig = RayConfig()
    limits: LimitsConfig = LimitsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    storage: StorageConfig = StorageConfig()
    logs: LogsConfig = LogsConfig()
    loras: LorasConfig = LorasConfig()
    preprocessors: PreprocessorsConfig = PreprocessorsConfig()
    control: ControlConfig = ControlConfig()
    pools: tuple[PoolConfig, ...] = Field(min_length=1)
    discriminators: tuple[DiscriminatorConfig, ...] = ()
    cascades: tuple[CascadeConfig, ...] = ()
    controlnets: tuple[ControlNetConfig, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> ClusterConfig:
        names = [pool.name for pool in self.pools]
        if len(set(names)) != len(names):
            raise ValueError(f"pool names must differ, given {names}")
        models = [pool.model_name for pool in self.pools]
        check_cascades(self.cascades, self.discriminators, pools=names, models=models)
        others = [*RESERVED_NAMES, *names, *(one.name for one in self.discriminators)]
        check_controlnets(self.controlnets, models=models, applications=others)
        self._check_control()
        grace_s, upload_s = self.storage.inputs_grace_s, self.limits.max_upload_s
        if grace_s < 2 * upload_s:
            raise ValueError(
                f"storage.inputs_grace_s {grace_s:g} is below twice limits.max_upload_s "
                f"{upload_s:g}: an image could be deleted before the call that sends it is "
                "accepted; raise the one or lower the other"
            )
        return self

    def _check_control(self) -> None:
        if not self.control.enabled:
            return
        if self.control.scaling == "endpoint" and not self.ray.include_dashboard:
            raise ValueError(
                "control.scaling is endpoint and ray.include_dashboard is false: the controller "
                "scales Ray Serve through the dashboard's port; set ray.include_dashboard: true, "
                "control.scaling: policy, or control.enabled: false"
            )
        used: dict[str, str] = {}
        for one in self.cascades:
            for model in (one.light, one.heavy):
                if model in used:
                    raise ValueError(
                        f"control.enabled is true, and the cascades {used[model]} and {one.name} "
                        f"share the model {model}: the controller plans a model for one cascade. "
                        "Serve it twice under two names, or set control.enabled: false"
                    )
                used[model] = one.name

    def pool(self, name: str) -> PoolConfig:
        """Return the pool of that name; raises :class:`ConfigError` if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise ConfigError(f"no pool {name!r}; there are {[pool.name for pool in self.pools]}")

    def discriminator(self, name: str) -> DiscriminatorConfig:
        """Return the discriminator of that name; raises :class:`ConfigError` if there is none."""
        for one in self.discriminators:
            if one.name == name:
                return one
        raise ConfigError(
            f"no discriminator {name!r}; there are {[one.name for one in self.discriminators]}"
        )

    def controlnet(self, name: str) -> ControlNetConfig:
        """Return the ControlNet of that name; raises :class:`ConfigError` if there is none."""
        for one in self.controlnets:
            if one.name == name:
                return one
        raise ConfigError(
            f"no ControlNet {name!r}; there are {[one.name for one in self.controlnets]}"
        )

    def title(self, worker: str) -> str:
        """Return what a worker's application is, and its name, for messages."""
        if worker in ("loras", "controller"):
            return {"loras": "store of LoRAs"}.get(worker, worker)
        if any(one.name == worker for one in self.controlnets):
            return f"ControlNet {worker}"
        is_scorer = any(one.name == worker for one in self.discriminators)
        return f"discriminator {worker}" if is_scorer else f"pool {worker}"

    @property
    def workers(self) -> tuple[PoolConfig | DiscriminatorConfig | ControlNetConfig, ...]:
        """All that has an application of its own beside ``front`` and ``loras``."""
        services = (one for one in self.controlnets if one.is_service)
        return (*self.pools, *self.discriminators, *services)


def default_config_path() -> Path:
    """Return the path of ``configs/local.yaml``, which ships with the package."""
    return Path(str(resources.files("ray_cluster") / "configs" / "local.yaml"))


def load_config(
    source: ClusterConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    folder: Path | None = None,
) -> ClusterConfig:
    """Return the validated configuration from an object, a mapping, a YAML path or the default.

    API keys from the environment variable ``RAY_CLUSTER_API_KEYS`` (comma-separated) are added;
    they are plain.

    Args:
        folder: where relative paths of ``storage`` start; the working folder unless given.

    Raises:
        ConfigError: the file is missing or a key is wrong; the message names each one.
    """
    if isinstance(source, ClusterConfig):
        return source
    where = "configuration"
    if source is None or isinstance(source, str | Path):
        path = Path(source) if source is not None else default_config_path()
        where = str(path)
        source = read_mapping(path, "configuration")
    try:
        config = ClusterConfig.model_validate(_with_environment(dict(source)))
    except ValidationError as error:
        raise ConfigError(f"{where}: {describe(error, ClusterConfig)}") from error
    folder = Path.cwd() if folder is None else folder
    parts = {
        name: getattr(config, name).resolved(folder)
        for name in ("storage", "loras", "preprocessors")
    }
    return config.model_copy(update=parts)


def environment_keys() -> tuple[str, ...]:
    """Return the API keys that this process's environment adds to those of any configuration."""
    given = os.environ.get(_API_KEYS_VARIABLE, "").split(",")
    return tuple(key.strip() for key in given if key.strip())


def environment_key() -> str | None:
    """Return the API key that commands of this environment call services with, if it has one."""
    return os.environ.get(_OWN_KEY_VARIABLE, "").strip() or None


def _with_environment(content: dict[str, Any]) -> dict[str, Any]:
    keys = environment_keys()
    http = content.get("http") or {}
    given = http.get("api_keys", ()) if isinstance(http, dict) else None
    # what is no list is refused as it is
    if keys and isinstance(given, list | tuple):
        content["http"] = {**http, "api_keys": [*given, *keys]}
    return content


def set_environment(settings: Mapping[str, str]) -> None:
    """Set variables for the processes that this one starts, unless they are set already."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)
