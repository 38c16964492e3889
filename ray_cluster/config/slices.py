"""The part of a configuration that each process is started with: no settings.

It does not change while an application runs, so a new API key, limit or pool makes Serve replace
nothing. Settings have their defaults in it; those in force come from the dispatcher.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr, ValidationError

from ray_cluster.config.kinds import GROUP_DEPLOYMENT, KINDS, WorkerKind
from ray_cluster.config.loading import Document, WorkerT, environment_keys, section_of
from ray_cluster.config.section import Applied, Section, part, with_part, without_unknown
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.sections.workers import WorkerConfig
from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError, without_password

logger = logging.getLogger(__name__)

SectionT = TypeVar("SectionT", bound=Section)

# sections that processes are started with
OF_ALL = ("dispatch", "logs")
OF_FRONT = ("http", "dispatch", "storage", "loras", "preprocessors", "logs", "control")
OF_CONTROLLER = ("control", *OF_ALL)


class FrontArguments(Document):
    """Arguments of the dispatcher and the gateways.

    Attributes:
        settings: path of the watched configuration file where the dispatcher runs; None if the
            settings given at the start stay.
        folder: where relative paths of the file's storage start; None where there are none.
        overridden: keys that options set, whatever the file says.
        api_keys: of the environment at the deployment, added to the file's.
    """

    settings: str | None = None
    folder: str | None = None
    overridden: tuple[str, ...] = ()
    api_keys: tuple[SecretStr, ...] = ()


class WorkerArguments(Document):
    """Arguments of the replicas of a worker; its section has that worker alone.

    Attributes:
        name: of its application.
    """

    kind: WorkerKind
    name: str

    @property
    def own(self) -> WorkerConfig:
        """The worker's section; stores of LoRAs have none."""
        return _found(self, self.name)

    @property
    def is_group(self) -> bool:
        """Whether its replicas are groups of ranks."""
        return self.kind == "denoise" and self.pools[0].is_group

    @property
    def deployment(self) -> str:
        """Name of its Serve deployment."""
        return deployment_of(self, self.name)


def deployment_of(config: Document, name: str) -> str:
    """Return the name of a worker's Serve deployment; ConfigError if there is no such worker."""
    kind, worker = config.kind_of(name), config.find(name)
    is_group = isinstance(worker, PoolConfig) and worker.is_group
    return GROUP_DEPLOYMENT if is_group else KINDS[kind].deployment


def front_arguments(
    config: Document,
    settings: Path | str | None = None,
    *,
    folder: Path | None = None,
    overridden: tuple[str, ...] = (),
) -> FrontArguments:
    """Return the front's part of a configuration; arguments as of :class:`FrontArguments`."""
    places: dict[str, Any] = {}
    if settings is not None:
        places["settings"] = str(Path(settings).absolute())
    if folder is not None:
        places["folder"] = str(folder)
    return FrontArguments(
        **_started(config, OF_FRONT),
        **places,
        overridden=overridden,
        api_keys=tuple(SecretStr(key) for key in environment_keys()),
    )


def controller_arguments(config: Document) -> Document:
    """Return the controller's part of a configuration."""
    return Document(**_started(config, OF_CONTROLLER))


def worker_arguments(config: Document, name: str) -> WorkerArguments:
    """Return the part of a worker's replicas; ConfigError if there is no such worker."""
    kind = config.kind_of(name)
    row = KINDS[kind]
    parts = _started(config, (*OF_ALL, *row.also_reads), for_front=False)
    if kind == "lora":
        parts |= _started(config, [row.section], for_front=False)
    else:
        parts[row.section] = [part(_found(config, name), "redeploy", given_only=True)]
    if kind == "denoise":
        parts["controlnets"] = _run_by(config, name)
    return WorkerArguments(kind=kind, name=name, **parts)


def _run_by(config: Document, pool: str) -> list[dict[str, Any]]:
    """Return the ControlNets that the replicas of a pool run themselves."""
    models = {one.name: one.model_name for one in config.pools}
    return [
        part(one, "redeploy", given_only=True)
        for one in config.controlnets
        if not one.is_service and models[pool] in one.bases
    ]


def _started(
    config: Document, sections: Iterable[str], *, for_front: bool = True
) -> dict[str, Any]:
    parts = {
        name: part(getattr(config, name), "redeploy", for_front=for_front, given_only=True)
        for name in sections
    }
    return {name: given for name, given in parts.items() if given}


def _found(config: Document, name: str) -> WorkerConfig:
    found = config.find(name)
    assert found is not None, f"{name} has a kind"
    return found


def as_json(arguments: Document) -> dict[str, Any]:
    """Return arguments as Serve's config file has them; API keys of the environment are left out.

    Only what was given stands in it: settings, of which they have none, would be there as defaults.
    """
    return arguments.model_dump(mode="json", exclude_unset=True, exclude={"api_keys"})


def settings_part(worker: WorkerConfig) -> dict[str, Any]:
    """Return a worker's settings, and the number of replicas that some are checked against."""
    return part(worker, "live", "count")


def with_settings(worker: WorkerT, live: Mapping[str, Any]) -> WorkerT:
    """Return a worker's section with the settings in force.

    Args:
        live: as of :func:`settings_part`; keys of another release are ignored, and logged.

    Raises:
        ConfigError: they do not suit what it was started with: the file was changed in both.
    """
    kind = type(worker)
    known, unknown = without_unknown(kind, live)
    if unknown:
        logger.warning("settings of %s that are not known here: %s", worker.name, unknown)
    try:
        return with_part(worker, known)
    except ValidationError as error:
        raise ConfigError(f"{worker.name}: {describe(error, kind)}") from error


def registered(worker: WorkerConfig) -> str:
    """Return what a worker was started with, as its replicas register it: JSON, no settings."""
    return json.dumps(part(worker, "redeploy"))


@lru_cache(1000)
def started_section(kind: WorkerKind, text: str) -> WorkerConfig | None:
    """Return a worker's section from what its replicas have registered; see :func:`registered`.

    None, once logged, for what another release has registered and this one cannot read.
    """
    section: type[WorkerConfig] = section_of(KINDS[kind])
    try:
        return parsed(section, text)
    except ValidationError as error:
        logger.warning("a registered %s is not read: %s", KINDS[kind].title, error)
        return None


def parsed(kind: type[SectionT], text: str | bytes) -> SectionT:
    """Return a section from JSON that perhaps another release has written: what is unknown here is
    ignored, and logged."""
    known, unknown = without_unknown(kind, json.loads(text))
    if unknown:
        logger.warning("settings that are not known here: %s", unknown)
    return kind.model_validate(known)


def needs_redeploy(
    running: FrontArguments, workers: Mapping[str, WorkerConfig], wanted: Document
) -> list[str]:
    """Return what of a configuration differs from what runs, and needs a redeploy.

    Args:
        running: of the front.
        workers: what the known workers were started with.
    """
    found = [
        f"front {key} ({without_password(old)} runs, the file has {without_password(new)})"
        for key, old, new in _front_differences(running, wanted)
        if key not in running.overridden
    ]
    return [*found, *started_otherwise(workers, wanted, "redeploy")]


def started_otherwise(
    workers: Mapping[str, WorkerConfig], wanted: Document, *of: Applied
) -> Iterator[str]:
    """Yield what of a configuration differs from what workers were started with.

    Args:
        of: marks of keys to compare beside those that calls are checked with.
    """
    for worker in wanted.workers:
        before, title = workers.get(worker.name), wanted.title(worker.name)
        if before is not None and type(before) is not type(worker):
            yield f"{title} (a worker of another kind has this name)"
        elif before is not None:
            old, new = (part(one, *of, for_calls=True) for one in (before, worker))
            for key, runs, has in _differences(old, new):
                yield f"{title} {key} ({runs} runs, the file has {has})"


def outranked(running: FrontArguments, wanted: Document) -> list[str]:
    """Return what of a configuration differs from what runs because an option was given."""
    return [
        f"{key} ({without_password(old)} runs, the file has {without_password(new)})"
        for key, old, new in _front_differences(running, wanted)
        if key in running.overridden
    ]


def _front_differences(running: FrontArguments, wanted: Document) -> Iterator[tuple[str, Any, Any]]:
    before, after = (
        {name: part(getattr(one, name), "redeploy") for name in OF_FRONT}
        for one in (running, wanted)
    )
    return _differences(before, after)


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
