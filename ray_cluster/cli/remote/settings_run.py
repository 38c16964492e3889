"""What the commands of ``settings`` do: show; compare, write, add and remove pools, wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml

from ray_cluster.cell.live_settings import SettingsReport
from ray_cluster.cli.service.model_plans import profile_of
from ray_cluster.cli.service.ray_messages import short_reason
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cascades import DiscriminatorConfig
from ray_cluster.config.sections.keys import KEY_PREFIX, ApiKey
from ray_cluster.config.sections.workers import WorkerConfig
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.config.slices import deployment_of, needs_redeploy, outranked, replicas_key
from ray_cluster.deployments.serve.deploy_file import FRONT, GATEWAY
from ray_cluster.dispatch.planned import document_version
from ray_cluster.engine.controlnets.checks import check_controlnet
from ray_cluster.engine.files.folders import is_hub_id, local_folder
from ray_cluster.engine.scorers.checks import check_scorer
from ray_cluster.errors import ConfigError, RayClusterError
from ray_cluster.models.builtin import discriminator_folder
from ray_cluster.models.local import check_models
from ray_cluster.protocol.leases import called_lane, lane_words

_POLL_S = 0.3
_FAILED = {"DEPLOY_FAILED", "UNHEALTHY"}
_DIGEST_CHARS = 8
# in Serve's words for a replica that waits for resources
_NOT_SCHEDULED = "to be scheduled"
_SCALE = "change it through Serve's scale API or restart the service"

# called with the name and the state of what is waited for, and `is_done`
Show = Callable[..., None]
# called with a sentence for the user
Note = Callable[[str], None]


class NotApplied(RayClusterError):
    """Not every process has applied the settings."""


class Cell(Protocol):
    """A running service; see :class:`ray_cluster.cli.service.running_cell.RunningCell`."""

    def report(self) -> SettingsReport: ...

    def write(self, text: str) -> str: ...

    def state_by_application(self) -> dict[str, str]: ...

    def message_of(self, application: str) -> str: ...

    def num_replicas(self, application: str, deployment: str) -> int | None: ...

    def resources(self) -> Mapping[str, tuple[float, float]]: ...

    def add(self, config: ClusterConfig, names: Collection[str]) -> None: ...

    def remove(self, names: Collection[str], on_change: Callable[[str, str], None]) -> None: ...


def settings_text(report: SettingsReport) -> str:
    """Return the settings as YAML, with a head that names each process and its version."""
    content = report.settings.content()
    keys = [_key_words(key) for key in report.settings.api_keys]
    content["http"] = {"api_keys": keys, **content["http"]}
    return "\n".join([*_head(report), "", yaml.safe_dump(content, sort_keys=False).rstrip()])


def _key_words(key: ApiKey) -> str | dict[str, object]:
    digest = f"{KEY_PREFIX}{key.digest[:_DIGEST_CHARS]}..."
    if key.client == key.digest:
        return digest
    return {"name": key.client, "key": digest, "roles": list(key.roles)}


def _head(report: SettingsReport) -> Iterator[str]:
    yield f"# version {report.version}, of {report.path or 'the start: no file is watched'}"
    if report.problem:
        yield f"# {report.problem}"
    for gateway, version in sorted(report.version_by_gateway.items()):
        yield f"# {gateway}: {version or 'none yet'}"
    for one in sorted(report.replicas, key=lambda one: (one.pool, one.replica_id)):
        yield (
            f"# replica {one.replica_id} of {one.pool}: {one.version or 'none yet'}, "
            f"max_batch {one.max_batch}, max_in_flight {one.max_in_flight}"
        )
        for request_id, ranks in sorted(one.seats.items(), key=lambda seat: seat[1]):
            yield f"#   ranks {', '.join(map(str, ranks))}: {request_id}"


@dataclass(frozen=True, slots=True)
class Changes:
    """What a file changes in a running service.

    Attributes:
        refused: what only a redeploy could change.
        added: workers without an application.
        removed: those whose applications go.
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
    wanted = {one.name: called_lane(one) for one in config.workers}
    # what was started counts, whatever the settings say by now
    known = (*report.settings.workers, *report.workers.values())
    running = {one.name: called_lane(one) for one in known}
    removed = [name for name in running if name in applications and name not in wanted]
    return Changes(
        refused=tuple(needs_redeploy(report.front, report.workers, config)),
        added=tuple(name for name in wanted if name not in applications),
        removed=tuple(removed),
        ended_models=frozenset(running[name] for name in removed) - {*wanted.values(), ""},
    )


def checked(path: Path) -> None:
    """Raise :class:`ConfigError` for a file that no service would accept."""
    file = SettingsFile(path, None, check_models)
    file.parse(file.content())


def not_changed(cell: Cell, report: SettingsReport, config: ClusterConfig) -> Iterator[str]:
    """Yield what of a file is not applied, though nothing needs to be replaced for it."""
    option = "an option of 'serve' outranks the file"
    for found in outranked(report.front, config):
        yield f"not changed: {found}; {option}"
    gateways = cell.num_replicas(FRONT, GATEWAY)
    if gateways not in (None, config.http.num_gateways):
        numbers = f"({gateways} run, the file has {config.http.num_gateways})"
        yield f"not changed: http.num_gateways {numbers}; restart the service"
    # a controller chooses the others
    for worker in () if config.control.enabled else config.workers:
        count = cell.num_replicas(worker.name, deployment_of(config, worker.name))
        if count not in (None, worker.replicas):
            why = option if replicas_key(worker.name) in report.front.overridden else _SCALE
            numbers = f"({count} run, the file has {worker.replicas})"
            yield f"not changed: {config.title(worker.name)} replicas {numbers}; {why}"


def capped(report: SettingsReport) -> Iterator[str]:
    """Yield the pools whose replicas make smaller batches than the settings say."""
    for pool in report.settings.pools:
        batches = [
            one.max_batch
            for one in report.replicas
            if one.pool == pool.name
            and one.max_batch < pool.max_batch
            # else a plan has lowered it
            and one.version == report.version
        ]
        if batches:
            yield (
                f"capped: pool {pool.name} max_batch ({min(batches)} in {len(batches)} "
                f"replica(s), the file has {pool.max_batch}); they planned their memory for fewer "
                "when they loaded: restart them for more"
            )


def apply_file(cell: Cell, path: Path, *, timeout_s: float, show: Show, note: Note) -> None:
    """Apply a file to a running service.

    Args:
        note: is called with what of the file is not applied.

    Raises:
        ConfigError: the file is wrong, needs a redeploy, or cannot be written to its place.
        NotApplied: a process does not apply it in time, or a pool of the file does not run.
    """
    deadline_s = time.monotonic() + timeout_s
    report, applications = cell.report(), cell.state_by_application()
    folder = None if report.front.folder is None else Path(report.front.folder)
    file = SettingsFile(path, folder, check_models)
    content = file.content()
    config = file.parse(content)
    changes = changes_of(report, applications, config)
    if changes.refused:
        raise ConfigError(
            f"nothing was changed; this needs a redeploy: {', '.join(changes.refused)}"
        )
    _check_added(config, changes.added)
    standing = [one.name for one in config.workers if one.name not in changes.added]
    notes = list(not_changed(cell, report, config))
    version = cell.write(content.decode())
    show("settings", f"version {version} is in force")
    for text in notes:
        note(text)
    if changes.added:
        cell.add(config, changes.added)
        _wait_added(cell, config, changes.added, deadline_s, show)
    for text in capped(_wait_applied(cell, version, deadline_s, show)):
        note(text)
    if changes.removed:
        _wait_images(cell, changes.ended_models, deadline_s, show)
        cell.remove(
            changes.removed,
            lambda name, state: show(report.title(name), state, is_done=state == "stopped"),
        )
    _wait_standing(cell, config, standing, deadline_s, show)


def _check_added(config: ClusterConfig, names: Collection[str]) -> None:
    """Refuse new pools whose models cannot be loaded, as far as they are on this machine."""
    for pool in config.pools:
        if pool.name not in names:
            continue
        try:
            # a folder that is not here may be on another machine, if there is one
            must_be_here = config.ray.address is None and not is_hub_id(pool.model)
            if must_be_here or local_folder(*pool.files) is not None:
                profile_of(pool)
        except RayClusterError as error:
            raise ConfigError(f"nothing was changed; pool {pool.name}: {error}") from error
    for judge in config.discriminators:
        if judge.name in names and (config.ray.address is None or Path(judge.model).is_dir()):
            _check_discriminator(judge)
    for control in config.controlnets:
        if control.name in names and config.ray.address is None:
            try:
                check_controlnet(control, config)
            except RayClusterError as error:
                raise ConfigError(f"nothing was changed; {error}") from error


def _check_discriminator(judge: DiscriminatorConfig) -> None:
    if discriminator_folder(judge.model) is None and is_hub_id(judge.model):
        return
    try:
        check_scorer(judge.model, calibration=judge.calibration)
    except RayClusterError as error:
        raise ConfigError(f"nothing was changed; discriminator {judge.name}: {error}") from error


def _wait_added(
    cell: Cell, config: ClusterConfig, names: Collection[str], deadline_s: float, show: Show
) -> None:
    """Wait until new pools run; one that fails is taken down again."""
    failed = _wait_running(cell, config, names, deadline_s, show)
    if failed:
        # for the next time that the file is applied
        cell.remove(failed, lambda name, state: show(config.title(name), state))
        raise NotApplied(
            f"what is new does not start: {_reasons(failed)}; mend that and apply the file again; "
            f"{_undo(failed)}"
        )


def _wait_standing(
    cell: Cell, config: ClusterConfig, names: Collection[str], deadline_s: float, show: Show
) -> None:
    """Wait likewise for pools of the file that were there before, such as at an earlier try."""
    states = cell.state_by_application()
    behind = [name for name in names if states.get(name) != "RUNNING"]
    failed = _wait_running(cell, config, behind, deadline_s, show)
    if failed:
        raise NotApplied(
            f"the settings are in force, but not every pool runs: {_reasons(failed)}; mend that, "
            f"or {_undo(failed)}"
        )


def _wait_running(
    cell: Cell, config: ClusterConfig, names: Collection[str], deadline_s: float, show: Show
) -> Mapping[str, str]:
    """Wait until pools run, and say what they lack; return the reasons of those that failed."""
    workers = {one.name: one for one in config.workers}
    while True:
        states = cell.state_by_application()
        found = {name: states.get(name, "NOT_STARTED") for name in names}
        failed = {
            name: short_reason(cell.message_of(name)) for name in names if found[name] in _FAILED
        }
        for name, state in found.items():
            is_waiting = state != "RUNNING" and name not in failed
            lacking = _lacking(cell, workers[name]) if is_waiting else ""
            words = f"{state.lower()}; {lacking}" if lacking else state.lower()
            show(config.title(name), words, is_done=state == "RUNNING")
        waiting = [name for name, state in found.items() if state != "RUNNING"]
        if failed or not waiting:
            return failed
        needs = "; ".join(_need(cell, workers[name]) for name in waiting)
        titles = [config.title(name) for name in waiting]
        late = f"{_and(titles)} {'does' if len(titles) == 1 else 'do'}"
        _sleep(deadline_s, f"{late} not run yet ({needs}); {_undo(waiting)}")


def _reasons(failed: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {reason}" for name, reason in failed.items())


def _need(cell: Cell, worker: WorkerConfig) -> str:
    """Say what a replica lacks, or else what Serve says of it."""
    return (
        _lacking(cell, worker)
        or " ".join(cell.message_of(worker.name).split())
        or f"the replicas of {worker.name} are starting"
    )


def _lacking(cell: Cell, worker: WorkerConfig) -> str:
    """Say what a replica lacks; empty if it may be starting."""
    message = " ".join(cell.message_of(worker.name).split())
    resources = cell.resources()
    lacking = []
    for name, number in (("CPU", worker.reserved_cpus), ("GPU", worker.reserved_gpus)):
        free, total = resources.get(name, (0.0, 0.0))
        # one that is scheduled has taken its part of what is free
        if number > (free if _NOT_SCHEDULED in message else total):
            noun = name if number == 1 else f"{name}s"
            lacking.append(f"needs {number:g} {noun}, {free:g} of {total:g} are free")
    node = worker.node_resource
    if node is not None and not resources.get(node, (0.0, 0.0))[1]:
        lacking.append(f"needs a node with the resource {node}, which none has")
    return f"a replica of {worker.name} {' and '.join(lacking)}" if lacking else ""


def _undo(names: Collection[str]) -> str:
    it = "it" if len(names) == 1 else "them"
    return f"to undo it, remove {it} from the file and apply that again"


def _and(names: Collection[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _wait_applied(cell: Cell, version: str, deadline_s: float, show: Show) -> SettingsReport:
    """Wait until every gateway, and every replica of a worker in the settings, has the version."""
    while True:
        report = cell.report()
        if report.version != version:
            raise NotApplied(f"version {report.version} took the place of {version} meanwhile")
        listed = {one.name for one in report.settings.workers}
        replicas = {one.replica_id: one.version for one in report.replicas if one.pool in listed}
        gateways = report.version_by_gateway
        behind = [
            name for name, has in (gateways | replicas).items() if document_version(has) != version
        ]
        if gateways and not behind:
            applied = f"{len(gateways)} gateway(s) and {len(replicas)} replica(s)"
            show("settings", f"applied by {applied}", is_done=True)
            return report
        late = _and(behind or ["no gateway"])
        have = "have not" if len(behind) > 1 else "has not" if behind else "has"
        _sleep(deadline_s, f"{late} {have} applied version {version}")


def _wait_images(cell: Cell, models: Collection[str], deadline_s: float, show: Show) -> None:
    """Wait until no image is left of what calls cannot ask for any more."""
    while True:
        num_open = cell.report().num_images_by_model
        for model in models:
            count = num_open.get(model, 0)
            words = lane_words(model).removeprefix("the ")
            show(words, f"{count} image(s) left", is_done=count == 0)
        left = [model for model in models if num_open.get(model)]
        if not left:
            return
        _sleep(deadline_s, f"images of {', '.join(left)} are still being made; run it again")


def _sleep(deadline_s: float, what: str) -> None:
    if time.monotonic() > deadline_s:
        raise NotApplied(f"the settings are in force, but {what}")
    time.sleep(_POLL_S)
