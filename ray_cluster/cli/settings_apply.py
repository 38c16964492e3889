"""What ``settings apply`` does: compare, write, add and remove pools, wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ray_cluster.config.arguments import needs_redeploy
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.deployments.live_settings import SettingsReport
from ray_cluster.errors import ConfigError, RayClusterError
from ray_cluster.models.local import check_models

_POLL_S = 0.3
_FAILED = {"DEPLOY_FAILED", "UNHEALTHY"}


class NotApplied(RayClusterError):
    """Not every process goes by the settings."""


class Cell(Protocol):
    """A running service."""

    def report(self) -> SettingsReport:
        """Return the settings in force, and who goes by which."""

    def write(self, text: str) -> str:
        """Replace the watched file; return the version in force."""

    def state_by_application(self) -> dict[str, str]:
        """Return Serve's word for the state of each application."""

    def message_of(self, application: str) -> str:
        """Return what Serve says of an application."""

    def add(self, config: ClusterConfig, names: Collection[str]) -> None:
        """Deploy the applications of new pools."""

    def remove(self, names: Collection[str], on_change: Callable[[str, str], None]) -> None:
        """Take the applications of pools down."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a file changes in a running service.

    Attributes:
        refused: what only a redeploy could change.
        added: pools without an application.
        removed: pools whose applications go.
        ended_models: those that no pool makes any more.
    """

    refused: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    ended_models: frozenset[str]


def changes_of(
    report: SettingsReport, applications: Collection[str], config: ClusterConfig
) -> Changes:
    """Compare a configuration with what runs."""
    wanted = {pool.name: pool.model_name for pool in config.pools}
    running = {pool.name: pool.model_name for pool in report.settings.pools}
    running |= {name: pool.model_name for name, pool in report.pools.items()}
    removed = [name for name in running if name in applications and name not in wanted]
    return Changes(
        refused=tuple(needs_redeploy(report.front, report.pools, config)),
        added=tuple(name for name in wanted if name not in applications),
        removed=tuple(removed),
        ended_models=frozenset(running[name] for name in removed) - set(wanted.values()),
    )


def apply_file(cell: Cell, path: Path, *, timeout_s: float, say: Callable[[str], None]) -> None:
    """Have a running service go by a file.

    Raises:
        ConfigError: the file is wrong, needs a redeploy, or cannot be written to its place.
        NotApplied: a process does not go by it in time, or a new pool does not start.
    """
    deadline_s = time.monotonic() + timeout_s
    report, applications = cell.report(), cell.state_by_application()
    text, config = _read(path, report)
    changes = changes_of(report, applications, config)
    if changes.refused:
        raise ConfigError(f"nothing was changed; this needs a redeploy: {_list(changes.refused)}")
    version = cell.write(text)
    say(f"version {version} is in force")
    if changes.added:
        cell.add(config, changes.added)
    _wait_running(cell, changes.added, deadline_s, say)
    _wait_applied(cell, version, deadline_s, say)
    if changes.removed:
        _wait_made(cell, changes.ended_models, deadline_s, say)
        cell.remove(changes.removed, lambda name, state: say(f"pool {name}: {state}"))


def _read(path: Path, report: SettingsReport) -> tuple[str, ClusterConfig]:
    folder = None if report.front.folder is None else Path(report.front.folder)
    file = SettingsFile(path, folder, check_models)
    content = file.content()
    config = file.parse(content)
    return content.decode(), config


def _wait_running(
    cell: Cell, names: Collection[str], deadline_s: float, say: Callable[[str], None]
) -> None:
    said: dict[str, str] = {}
    while True:
        states = cell.state_by_application()
        found = {name: states.get(name, "NOT_STARTED") for name in names}
        _say_changes(said, {f"pool {name}": state.lower() for name, state in found.items()}, say)
        failed = [name for name, state in found.items() if state in _FAILED]
        if failed:
            texts = [f"{name}: {cell.message_of(name)}" for name in failed]
            raise NotApplied(f"a new pool does not start: {_list(texts)}")
        waiting = [name for name, state in found.items() if state != "RUNNING"]
        if not waiting:
            return
        _sleep(deadline_s, f"pools {_list(waiting)} do not run yet")


def _wait_applied(cell: Cell, version: str, deadline_s: float, say: Callable[[str], None]) -> None:
    """Wait until every gateway, and every replica of a pool in the settings, has the version."""
    while True:
        report = cell.report()
        if report.version != version:
            raise NotApplied(f"version {report.version} took the place of {version} meanwhile")
        listed = {pool.name for pool in report.settings.pools}
        replicas = {one.replica_id: one.version for one in report.replicas if one.pool in listed}
        gateways = report.version_by_gateway
        behind = [name for name, has in (gateways | replicas).items() if has != version]
        if gateways and not behind:
            say(f"{len(gateways)} gateway(s) and {len(replicas)} replica(s) go by it")
            return
        _sleep(deadline_s, f"{_list(behind) or 'no gateway'} have not applied version {version}")


def _wait_made(
    cell: Cell, models: Collection[str], deadline_s: float, say: Callable[[str], None]
) -> None:
    """Wait until nothing is left of models that nobody will make any more."""
    said: dict[str, str] = {}
    while True:
        open_images = cell.report().num_images_by_model
        left = {model: open_images[model] for model in models if open_images.get(model)}
        if not left:
            return
        _say_changes(said, {name: f"{count} image(s) left" for name, count in left.items()}, say)
        _sleep(deadline_s, f"images of {_list(left)} are still being made; run it again")


def _say_changes(
    said: dict[str, str], states: Mapping[str, str], say: Callable[[str], None]
) -> None:
    for name, state in states.items():
        if said.get(name) != state:
            say(f"{name}: {state}")
    said.update(states)


def _sleep(deadline_s: float, what: str) -> None:
    if time.monotonic() > deadline_s:
        raise NotApplied(f"the settings are in force, but {what}")
    time.sleep(_POLL_S)


def _list(items: Collection[str]) -> str:
    return ", ".join(items)
