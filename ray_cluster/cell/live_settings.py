"""The settings of a cell where they are applied: in the dispatcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from contextvars import Context
from dataclasses import dataclass, field
from typing import Protocol

from ray_cluster.config.kinds import KINDS
from ray_cluster.config.loading import ClusterConfig, section_of
from ray_cluster.config.sections.keys import ApiKey
from ray_cluster.config.sections.workers import WorkerConfig
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.config.slices import (
    FrontArguments,
    needs_redeploy,
    started_otherwise,
    started_section,
)
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.settings_in_force import SettingsBook, SettingsWatch
from ray_cluster.errors import ConfigError
from ray_cluster.observability.logs import log_event

logger = logging.getLogger(__name__)

_NOT_WATCHED = (
    "the service was started without a configuration file: its settings stay as they are; start it "
    "with one ('ray-cluster serve FILE')"
)
_LAST_KEY = (
    "the last API key is gone, so that anybody could call: leave one in http.api_keys (or in "
    "RAY_CLUSTER_API_KEYS), or set http.open: true"
)
NO_KEY = (
    "no API key is set, so the earlier ones stay in force: set http.api_keys (or "
    "RAY_CLUSTER_API_KEYS), or http.open: true to let anybody call"
)
"""What a service says that was started without the keys that it had before."""
_STAYS_OPEN = (
    "http.open is true beside API keys: a change that removes the last one would open the service "
    "to anybody; set it to false"
)


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """A replica, the settings that it has applied, and of a group which ranks step for whom."""

    replica_id: str
    pool: str
    version: str
    max_batch: int
    max_in_flight: int
    seats: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SettingsReport:
    """What ``ray-cluster settings`` shows of a running service.

    Attributes:
        settings: those in force; API keys are digests.
        path: of the watched file; None if none is watched.
        problem: what is wrong with the file as it is, if anything.
        front: what dispatcher and gateways were started with, without API keys.
        workers: what the live replicas of each worker were started with.
        version_by_gateway: version of each live gateway.
        num_images_by_model: images that wait or are being made.
    """

    version: str
    settings: Settings
    path: str | None
    problem: str
    front: FrontArguments
    workers: dict[str, WorkerConfig]
    version_by_gateway: dict[str, str]
    replicas: tuple[ReplicaReport, ...]
    num_images_by_model: dict[str, int]

    def title(self, worker: str) -> str:
        """Return what a worker is, and its name, also if it only runs."""
        kind = type(self.workers.get(worker))
        titles = [row.title for row in KINDS.values() if section_of(row) is kind]
        return f"{titles[0]} {worker}" if titles else self.settings.title(worker)


class SavedKeys(Protocol):
    """The API keys that an earlier dispatcher had; see :class:`ray_cluster.jobs.known_keys`."""

    async def load(self) -> tuple[ApiKey, ...]: ...

    async def save(self, keys: tuple[ApiKey, ...]) -> None: ...


class LiveSettings:
    """Keeps one document in force: that of the watched file, or the one given at the start.

    A change that leaves no API key is refused, unless it sets ``http.open``. A document without one
    at the start is not: the keys of an earlier dispatcher stay in force, if it had any.

    Args:
        config: the document at the start.
        file: watched from :meth:`start` on; None if the settings stay.
        core: tells which replicas there are.

    Raises:
        ConfigError: the document and the arguments have one API key with different names.
    """

    def __init__(
        self,
        arguments: FrontArguments,
        config: ClusterConfig,
        file: SettingsFile | None,
        core: DispatchCore,
        clock: Callable[[], float],
        saved_keys: SavedKeys,
    ) -> None:
        self._arguments = arguments
        self._config = config
        self._file = file
        self._core = core
        self._apply: Callable[[Settings], None] = lambda _settings: None
        self._watch = None if file is None else SettingsWatch(file, self._on_change)
        # pools that an edit of the file has added, or that could not be deployed
        self._not_deployed: set[str] = set()
        self._saved_keys = saved_keys
        self._saving: set[asyncio.Task[None]] = set()
        # of an earlier dispatcher, while the document of the start has none
        self._kept_keys: tuple[ApiKey, ...] = ()
        self.book = SettingsBook(settings_of(config, arguments.api_keys), clock)

    async def start(self, apply: Callable[[Settings], None]) -> None:
        """Have the settings applied now and whenever they change.

        Raises:
            JobStoreError: whether there were API keys before cannot be read.
            ConfigError: likewise; or the file is broken.
        """
        self._apply = apply
        if not (self.book.settings.api_keys or self._config.http.open):
            self._kept_keys = await self._saved_keys.load()
        self._put(settings_of(self._config, self._arguments.api_keys, self._kept_keys))
        if self._watch is not None:
            await self._watch.start()

    def stop(self) -> None:
        """Watch the file no more."""
        if self._watch is not None:
            self._watch.stop()

    def _on_change(self, config: ClusterConfig) -> None:
        settings = self._settings_in(config)
        if config != self._config:
            self._kept_keys = ()
        earlier = {one.name for one in self._config.workers}
        added = {one.name for one in config.workers if one.name not in earlier}
        self.note_undeployed(added)
        self._config = config
        if settings.version != self.book.settings.version:
            self._put(settings)

    def _settings_in(self, config: ClusterConfig) -> Settings:
        """Return a document's settings; ConfigError if they must not follow those in force."""
        # what has not changed was accepted at the start
        kept = self._kept_keys if config == self._config else ()
        settings = settings_of(config, self._arguments.api_keys, kept)
        if self.book.settings.api_keys and not (settings.api_keys or config.http.open):
            raise ConfigError(_LAST_KEY)
        # calls would be checked with what does not run, or sent to what is of another kind
        if found := list(started_otherwise(self._workers(), config)):
            raise ConfigError(f"this needs a redeploy: {', '.join(found)}")
        return settings

    def _put(self, settings: Settings) -> None:
        self._apply(settings)
        self.book.put(settings)
        log_event(logger, "settings_applied", version=settings.version)
        # in a context of its own: Serve cancels what a cancelled request has called
        saving = asyncio.create_task(self._saved_keys.save(settings.api_keys), context=Context())
        self._saving.add(saving)
        saving.add_done_callback(self._saving.discard)

    def note_undeployed(self, pools: Collection[str]) -> None:
        """Note pools that have no application, until a replica of theirs starts."""
        self._not_deployed.update(pools)
        self._core.started_pools -= set(pools)

    @property
    def is_healthy(self) -> bool:
        """Whether changes would be applied."""
        return self._watch is None or self._watch.is_healthy

    def warnings(self) -> tuple[str, ...]:
        """Return what of the document is not in force."""
        found = []
        if self._kept_keys:
            found.append(NO_KEY)
        if self._config.http.open and self.book.settings.api_keys:
            found.append(_STAYS_OPEN)
        if self._watch is not None and self._watch.problem:
            found.append(self._watch.problem)
        # of a refused file only the problem counts: an earlier version of it is no longer there
        elif keys := needs_redeploy(self._arguments, self._workers(), self._config):
            found.append(f"the settings' file has what needs a redeploy: {', '.join(keys)}")
        found += [
            # calls for /readyz need no key: it names no folder of this machine
            f"{self._config.title(name)} is in the settings but not deployed: run 'ray-cluster "
            "settings apply FILE'"
            for name in self._undeployed_pools()
        ]
        http = self._arguments.http
        if not (self.book.settings.api_keys or http.is_loopback):
            found.append(f"anybody who reaches {http.host}:{http.port} may call: no API key is set")
        found += [
            f"{KINDS[one.kind].title} {one.pool} runs, but is not in the settings"
            for one in {
                one.registration.pool: one.registration for one in self._core.replicas
            }.values()
            if one.arguments and self.book.settings.find(one.pool) is None
        ]
        return tuple(found)

    def undeployed(self) -> tuple[str, ...]:
        """Return models in the settings of which no pool is deployed, as far as is known here.

        Only pools that an edit of the file has added, or that were noted, count, until the first
        replica starts.
        """
        pools = self._undeployed_pools()
        deployed = {one.model_name for one in self._config.pools if one.name not in pools}
        missing = [one.model_name for one in self._config.pools if one.name in pools]
        return tuple(dict.fromkeys(name for name in missing if name not in deployed))

    def _undeployed_pools(self) -> list[str]:
        registered = {one.registration.pool for one in self._core.replicas}
        waiting = self._not_deployed - self._core.started_pools - registered
        return [one.name for one in self._config.workers if one.name in waiting]

    def report(self) -> SettingsReport:
        """Return what there is to be shown."""
        settings = self.book.settings
        return SettingsReport(
            version=settings.version,
            settings=settings,
            path=self._arguments.settings,
            problem="" if self._watch is None else self._watch.problem,
            front=self._arguments.model_copy(update={"api_keys": ()}),
            workers=self._workers(),
            version_by_gateway=self.book.version_by_gateway(),
            replicas=tuple(
                ReplicaReport(
                    replica_id=one.replica_id,
                    pool=one.registration.pool,
                    version=one.settings_version,
                    max_batch=one.registration.max_batch,
                    max_in_flight=one.registration.max_in_flight,
                    seats=one.seats,
                )
                for one in self._core.replicas
                # stores of LoRAs read no settings
                if one.registration.pool
            ),
            num_images_by_model=self._core.num_open_by_model(),
        )

    async def write(self, text: str) -> str:
        """Replace the file, and return the version that is in force then.

        Raises:
            ConfigError: it cannot be written, is no valid configuration, or leaves no API key.
        """
        if self._file is None or self._watch is None:
            raise ConfigError(_NOT_WATCHED)
        await asyncio.to_thread(self._write_change, self._file, text)
        await self._watch.look()
        if self._watch.problem:
            raise ConfigError(self._watch.problem)
        # whoever writes deploys its pools next
        self._not_deployed.clear()
        return self.book.settings.version

    def _write_change(self, file: SettingsFile, text: str) -> None:
        # what was edited in its place need not be writable here
        if file.content() != text.encode():
            # what would be refused is not written: the next dispatcher would start with it
            self._settings_in(file.parse(text.encode()))
            file.write(text)

    def _workers(self) -> dict[str, WorkerConfig]:
        registered = [one.registration for one in self._core.replicas]
        found = {
            one.pool: started_section(one.kind, one.arguments)
            for one in registered
            if one.arguments
        }
        return {name: one for name, one in found.items() if one is not None}
