"""The watched file: a configuration whose settings are applied while the service runs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.yaml_files import parse_mapping
from ray_cluster.errors import ConfigError

# through which Kubernetes swaps all files of a mounted ConfigMap at once
_CONFIG_MAP_LINK = "..data"
_KEYS_FILE = "file of API keys"


class SettingsFile:
    """Reads and writes one configuration file, and reads the file of API keys that it names.

    A ConfigMap's file is a link that is swapped for another: it is followed at every look.

    Args:
        folder: where relative paths of its storage start.
        check: raises :class:`ConfigError` for what is valid, but does not suit a model.
    """

    def __init__(
        self,
        path: Path,
        folder: Path | None = None,
        check: Callable[[ClusterConfig], None] = lambda _config: None,
    ) -> None:
        self.path = path
        self._folder = folder
        self._check = check
        self._keys_path: str | None = None

    def look(self) -> tuple[bytes, bytes]:
        """Return its content, and that of the file of API keys that was named by the one parsed
        last; by these a change is noticed. Raises :class:`ConfigError` if one cannot be read."""
        content, path = self.content(), self._keys_path
        return content, b"" if path is None else _read(Path(path), _KEYS_FILE)

    def content(self) -> bytes:
        """Return its content; :class:`ConfigError` if it cannot be read."""
        return _read(self.path, "configuration")

    def parse(self, content: bytes) -> ClusterConfig:
        """Return the configuration in a content, with the keys of the file of API keys.

        Raises:
            ConfigError: names everything that is wrong.
        """
        try:
            mapping = parse_mapping(content, "configuration")
            config = load_config(mapping, folder=self._folder)
            if config.http.api_keys_file is not None:
                more = _keys(Path(config.http.api_keys_file))
                http = mapping["http"]
                mapping["http"] = {**http, "api_keys": [*http.get("api_keys", ()), *more]}
                config = load_config(mapping, folder=self._folder)
            self._check(config)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        self._keys_path = config.http.api_keys_file
        return config

    def write(self, text: str) -> None:
        """Replace the file at once: its readers see all of the old or all of the new.

        Raises:
            ConfigError: it cannot be written, or the text is no valid configuration.
        """
        if (self.path.parent / _CONFIG_MAP_LINK).is_symlink():
            raise ConfigError(
                f"{self.path} is mounted from a ConfigMap: edit that, and it is applied by itself"
            )
        target = Path(os.path.realpath(self.path))
        is_read_only = target.exists() and not os.access(target, os.W_OK)
        if is_read_only or not os.access(target.parent, os.W_OK):
            raise ConfigError(
                f"{self.path} is read-only where the dispatcher runs: edit it where it comes from"
            )
        self.parse(text.encode())
        try:
            _replace(target, text)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error}") from None


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from None


def _keys(path: Path) -> list[Any]:
    """Return the entries in a file of API keys, which are not checked."""
    content = parse_mapping(_read(path, _KEYS_FILE), f"{_KEYS_FILE} {path}")
    given = content.get("api_keys")
    if not isinstance(given, list) or len(content) > 1:
        raise ConfigError(
            f"{_KEYS_FILE} {path} must hold the key 'api_keys' with a list of entries as in "
            "http.api_keys, and nothing else; 'ray-cluster keys new NAME' prints an entry"
        )
    return given


def _replace(target: Path, text: str) -> None:
    mode = target.stat().st_mode if target.exists() else 0o600
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode & 0o777)
        os.replace(name, target)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise
