"""The file that a service on this machine is started from, and the options that override it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray_cluster.config.loading import ClusterConfig, default_config_path, load_config
from ray_cluster.config.slices import FrontArguments, front_arguments, replicas_key
from ray_cluster.errors import ConfigError

_COPY = Path(".ray-cluster") / "local.yaml"


@dataclass(frozen=True, slots=True)
class ServedFile:
    """A configuration file with options on top. No option is a setting: the file has all of those.

    Attributes:
        changes: options by section and key; None for those that are not given.
        replicas: for the first pool.
    """

    path: Path
    changes: Mapping[str, Mapping[str, Any]]
    replicas: int | None = None

    def load(self) -> ClusterConfig:
        """Return the configuration with the options; ConfigError if that is not valid."""
        return with_options(load_config(self.path), self.changes, self.replicas)

    def front(self, config: ClusterConfig) -> FrontArguments:
        """Return the arguments of the front, which watches the file."""
        given = [
            f"{section}.{key}"
            for section, values in self.changes.items()
            for key, value in values.items()
            if value is not None
        ]
        if self.replicas is not None:
            given.append(replicas_key(config.pools[0].name))
        return front_arguments(config, self.path, folder=Path.cwd(), overridden=tuple(given))


def with_options(
    config: ClusterConfig, changes: Mapping[str, Mapping[str, Any]], replicas: int | None = None
) -> ClusterConfig:
    """Return a configuration with options, as of :class:`ServedFile`, validated like a file."""
    content = config.model_dump()
    for section, values in changes.items():
        content[section].update({key: value for key, value in values.items() if value is not None})
    if replicas is not None:
        content["pools"][0]["replicas"] = replicas
    return load_config(content)


def builtin_copy() -> Path:
    """Write the built-in configuration where it can be edited; return the path."""
    try:
        _COPY.parent.mkdir(exist_ok=True)
        _COPY.write_bytes(default_config_path().read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot write {_COPY}: {error}") from error
    return _COPY
