"""The configuration: one YAML file, validated. The environment is read here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from ray_cluster.config.kinds import KINDS, LORAS, Kind, WorkerKind
from ray_cluster.config.section import Section, section_in
from ray_cluster.config.sections.cascades import CascadeConfig, DiscriminatorConfig, check_cascades
from ray_cluster.config.sections.cell_wide import (
    DispatchConfig,
    LimitsConfig,
    LogsConfig,
    RayConfig,
    StorageConfig,
)
from ray_cluster.config.sections.controller import ControlConfig
from ray_cluster.config.sections.controlnets import ControlNetConfig, check_controlnets
from ray_cluster.config.sections.http import HttpConfig
from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.sections.preprocessors import PreprocessorsConfig
from ray_cluster.config.sections.upscalers import UpscalerConfig
from ray_cluster.config.sections.workers import RESERVED_NAMES, WorkerConfig
from ray_cluster.config.validation_errors import describe
from ray_cluster.config.yaml_files import read_mapping
from ray_cluster.errors import ConfigError

WorkerT = TypeVar("WorkerT", bound=WorkerConfig)

_API_KEYS_VARIABLE = "RAY_CLUSTER_API_KEYS"
_OWN_KEY_VARIABLE = "RAY_CLUSTER_API_KEY"


class Document(Section):
    """Sections of a configuration: all of them, or the part of one process with defaults else."""

    http: HttpConfig = HttpConfig()
    ray: RayConfig = RayConfig()
    limits: LimitsConfig = LimitsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    storage: StorageConfig = StorageConfig()
    logs: LogsConfig = LogsConfig()
    loras: LorasConfig = LorasConfig()
    preprocessors: PreprocessorsConfig = PreprocessorsConfig()
    control: ControlConfig = ControlConfig()
    pools: tuple[PoolConfig, ...] = ()
    discriminators: tuple[DiscriminatorConfig, ...] = ()
    cascades: tuple[CascadeConfig, ...] = ()
    controlnets: tuple[ControlNetConfig, ...] = ()
    upscalers: tuple[UpscalerConfig, ...] = ()

    @property
    def workers(self) -> tuple[WorkerConfig, ...]:
        """All that has an application of its own beside ``front`` and ``loras``."""
        return tuple(worker for _, worker in self._listed() if worker.is_service)

    def _listed(self) -> Iterator[tuple[WorkerKind, WorkerConfig]]:
        for kind, row in KINDS.items():
            if isinstance(workers := getattr(self, row.section), tuple):
                yield from ((kind, one) for one in workers)

    def find(self, name: str) -> WorkerConfig | None:
        """Return the worker of that name; None if there is none."""
        return next((one for _, one in self._listed() if one.name == name), None)

    def worker(self, kind: type[WorkerT], name: str) -> WorkerT:
        """Return the worker of that name in the sections of one type.

        Raises:
            ConfigError: there is none.
        """
        alike = [one for _, one in self._listed() if isinstance(one, kind)]
        for one in alike:
            if one.name == name:
                return one
        title = KINDS[kind_of_section(kind)].title
        raise ConfigError(f"no {title} {name!r}; there are {[one.name for one in alike]}")

    def without(self, names: Collection[str]) -> Self:
        """Return it without some workers; what needs them is not checked."""
        left = {
            row.section: tuple(one for one in listed if one.name not in names)
            for row in KINDS.values()
            if isinstance(listed := getattr(self, row.section), tuple)
        }
        return self.model_copy(update=left)

    def kind_of(self, name: str) -> WorkerKind:
        """Return the kind of the worker of that name.

        Raises:
            ConfigError: there is none.
        """
        if name == LORAS:
            return "lora"
        for kind, one in self._listed():
            if one.name == name and one.is_service:
                return kind
        raise ConfigError(f"no worker {name!r}; there are {[one.name for one in self.workers]}")

    def title(self, worker: str) -> str:
        """Return what an application is, and its name, for messages."""
        if worker in RESERVED_NAMES:
            return KINDS["lora"].title if worker == LORAS else worker
        # one that is not here any more was a pool, most probably
        listed = (KINDS[kind] for kind, one in self._listed() if one.name == worker)
        return f"{next(listed, KINDS['denoise']).title} {worker}"


def section_of(kind: Kind) -> type[Any]:
    """Return the section of a kind of workers: of one worker, where there is a list."""
    found = section_in(Document.model_fields[kind.section].annotation)
    assert found is not None, f"{kind.section} is a section"
    return found


def kind_of_section(section: type[WorkerConfig]) -> WorkerKind:
    """Return the kind of workers that a section is of."""
    return next(kind for kind, row in KINDS.items() if section_of(row) is section)


class ClusterConfig(Document):
    """The whole configuration of one cell."""

    pools: tuple[PoolConfig, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> ClusterConfig:
        names = [one.name for _, one in self._listed()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                "the names of pools and of all other workers must differ; given more than once: "
                f"{twice}"
            )
        models = [pool.model_name for pool in self.pools]
        check_cascades(self.cascades, self.discriminators, models)
        check_controlnets(self.controlnets, models)
        self._check_control()
        if len(self.upscalers) > 1:
            raise ValueError(
                f"upscalers has {len(self.upscalers)} entries, and one serves all calls: leave "
                "one, with as many `replicas` as you need"
            )
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
