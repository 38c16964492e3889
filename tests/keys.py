"""Configurations with API keys, plain ones and ones with names and roles."""

from __future__ import annotations

from typing import Any

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.http import HttpConfig
from ray_cluster.config.sections.keys import ApiKey, KeyConfig, Role


def with_keys(config: ClusterConfig, *keys: str | KeyConfig) -> ClusterConfig:
    """Return the configuration with these keys alone."""
    values: dict[str, Any] = {**config.http.model_dump(), "api_keys": keys}
    return config.model_copy(update={"http": HttpConfig(**values)})


def entry(name: str, key: str, *roles: Role) -> dict[str, Any]:
    """Return the entry of a key with a name, as a configuration file has it."""
    made = KeyConfig.of(name, key, roles or ["use"])
    return {"name": name, "key": made.key.get_secret_value(), "roles": list(made.roles)}


def bearer(key: str) -> dict[str, str]:
    """Return the header that gives a key."""
    return {"Authorization": f"Bearer {key}"}


class FakeSavedKeys:
    """Keeps the keys that a dispatcher saves for the next one."""

    def __init__(self, *keys: ApiKey) -> None:
        self.keys = keys

    async def load(self) -> tuple[ApiKey, ...]:
        return self.keys

    async def save(self, keys: tuple[ApiKey, ...]) -> None:
        self.keys = keys
