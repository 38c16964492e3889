"""The front of a cell as one object: requests, jobs, LoRAs, and the settings in force.

Whoever hosts it (a Serve deployment, a :class:`~ray_cluster.cell.local.LocalCell`, a test) opens
the stores, starts it on an event loop, and has its calls answered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ray_cluster.cell.live_settings import LiveSettings
from ray_cluster.cell.service import CellService
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cascades import CascadeConfig
from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.config.settings import Settings
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.config.slices import FrontArguments
from ray_cluster.dispatch.cascades.candidates import Candidates
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.dispatch.state_sweeper import StateSweeper
from ray_cluster.errors import ConfigError
from ray_cluster.jobs.service import JobService
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.models.local import check_models
from ray_cluster.observability.metrics_snapshot import MetricsBook
from ray_cluster.policies.cascade import DeferralCurve
from ray_cluster.protocol.calling.interface import Method, methods_of, stub
from ray_cluster.protocol.controller import ControlCalls, PlanCalls
from ray_cluster.protocol.dispatcher import (
    CellCalls,
    DispatcherClient,
    DispatcherLink,
    ImageCalls,
    JobCalls,
    LoraCalls,
)
from ray_cluster.protocol.leases import Registration, lanes_of
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.checks import refuse_unusable
from ray_cluster.storage.inputs import InputStore

logger = logging.getLogger(__name__)

# of a process that reports its metrics every few seconds
_SILENCE_S = 30.0
# within which a store of LoRAs registers, on a busy machine too
_STORE_STARTS_S = 60.0
# in which what is being written of jobs that are handed over ends
_LEAVES_S = 5.0


@dataclass(frozen=True, slots=True)
class Stores:
    """What outlives a front."""

    jobs: SqlJobStore
    results: BlobStore
    inputs: InputStore
    states: BlobStore

    @classmethod
    def open(cls, storage: StorageConfig) -> Stores:
        """Open the stores of a configuration; call it off the event loop.

        Raises:
            ConfigError, JobStoreError, BlobStoreError: one of them cannot be opened, or refuses.
        """
        results, states = BlobStore(storage.results), BlobStore(storage.states)
        inputs = InputStore.open(storage.inputs, grace_s=storage.inputs_grace_s)
        refuse_unusable((results, inputs, states))
        return cls(SqlJobStore.open(storage.job_store()), results, inputs, states)


@dataclass(frozen=True, slots=True)
class Identity:
    """Which front of which cell it is.

    Attributes:
        cell: what this front has in common with none but those before and after it.
        epoch: new in every life of a front.
    """

    cell: str = ""
    epoch: int = 0


class Front:
    """Owns the services of a cell; all of it lives on one event loop.

    Args:
        config: the settings at the start.
        file: watched for other settings; None if they stay.
        notices: returns what else operators should be told.
        clock: monotonic seconds.
        wall_clock: Unix time in seconds.

    Attributes:
        client: what a gateway calls, in this process.
        link: what a replica calls, in this process.
        restored: set once the open jobs of earlier fronts are known.
    """

    def __init__(
        self,
        arguments: FrontArguments,
        config: ClusterConfig,
        stores: Stores,
        *,
        identity: Identity,
        file: SettingsFile | None = None,
        notices: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.core = core_of(config, identity.epoch, clock())
        self.states = StateSweeper(
            stores.states,
            knows=self.core.knows,
            note_stored=self.core.note_stored,
            wall_clock=wall_clock,
        )
        book = MetricsBook(_SILENCE_S)
        self.dispatch = DispatchService(
            self.core,
            config=config.dispatch,
            clock=clock,
            on_outcome=self.states.on_outcome,
            candidates=Candidates(stores.results),
            on_metrics=lambda replica, own: book.update(replica, own, clock()),
            on_register=self._save_worker,
        )
        self.jobs = JobService(
            self.dispatch,
            stores.jobs,
            stores.results,
            stores.inputs,
            config=config.storage,
            max_open_per_client=config.limits.max_open_jobs_per_client,
            wall_clock=wall_clock,
            lora_sources=arguments.loras.sources,
        )
        self.jobs.ownership.cell = identity.cell
        self.jobs.ownership.service = arguments.dispatch.service or ""
        self._starting: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._is_started = False
        self.jobs.control.is_enabled = arguments.control.enabled
        keys = self.jobs.known_keys
        self.settings = LiveSettings(arguments, config, file, self.core, clock, keys)
        self.cell = CellService(
            self.dispatch,
            self.jobs,
            book,
            self.settings.book,
            clock=clock,
            wall_clock=wall_clock,
            notices=lambda: (*self.settings.warnings(), *notices()),
            undeployed=self.settings.undeployed,
        )
        self.restored = asyncio.Event()
        self.client: DispatcherClient = stub(DispatcherClient, self._call)
        self.link: DispatcherLink = stub(DispatcherLink, self._call)

    @cached_property
    def services(self) -> dict[type, object]:
        """Who answers the calls of each interface."""
        return {
            ImageCalls: self.dispatch,
            JobCalls: self.jobs,
            CellCalls: self.cell,
            LoraCalls: self.jobs.loras,
            DispatcherLink: self.dispatch,
            ControlCalls: self.jobs.control,
            PlanCalls: self.jobs.control,
        }

    @cached_property
    def _service_of(self) -> dict[str, object]:
        return {
            name: service
            for interface, service in self.services.items()
            for name in methods_of(interface)
        }

    async def begin(self) -> None:
        """Start; while an earlier cell of this service serves, only once all workers of this one
        have registered, which they can do meanwhile.

        Raises:
            ConfigError, JobStoreError: as of :meth:`start`; later :meth:`check_health` tells.
        """
        if not await self.jobs.ownership.stands_by():
            await self.start()
            return
        # what workers are told before they load; calls are not answered
        self.dispatch.apply(self.settings.book.settings)
        self.core.stands_by = True
        # in a context of its own: Serve cancels what a cancelled request has called
        self._starting = asyncio.create_task(self._start_later(), context=Context())

    async def _start_later(self) -> None:
        await self.jobs.ownership.take_over(self._is_ready)
        await self.start()
        self.core.stands_by = False

    def _is_ready(self) -> bool:
        registered = {one.registration.pool for one in self.core.replicas}
        return registered >= {one.name for one in self.settings.book.settings.workers}

    def _hand_over(self) -> None:
        """Begin, once, to leave the jobs to a later cell of this service."""
        if self._leaving is None:
            self._leaving = asyncio.create_task(self.jobs.hand_over(), context=Context())

    async def start(self) -> None:
        """Take the job store over, put the settings in force, and begin to restore open jobs.

        Raises:
            ConfigError, JobStoreError: see :meth:`LiveSettings.start` and
                :meth:`Ownership.take <ray_cluster.jobs.store.ownership.Ownership.take>`.
        """
        # before anything is read or written
        await self.jobs.ownership.take()
        self._is_started = True
        for replica in self.core.replicas:
            self._save_worker(replica.registration)
        await self.settings.start(self._apply)
        # not before the open jobs are known
        self.jobs.on_restored = self._note_restored
        await self.jobs.start()
        self.cell.start()
        # not before: all of it is handed over
        self.jobs.ownership.on_wanted = self._hand_over

    async def stop(self) -> None:
        """Let the next front have the job store at once, and end all held polls."""
        if self._starting is not None:
            self._starting.cancel()
        self.settings.stop()
        if self._leaving is not None:
            await asyncio.wait([self._leaving], timeout=_LEAVES_S)
        await self.cell.close()
        await self.jobs.close()
        await self.states.close()
        await self.dispatch.close()

    def check_health(self) -> None:
        """Raise RuntimeError when it has to be replaced."""
        if self.jobs.ownership.is_lost:
            raise RuntimeError("another dispatcher has taken the job store, or it is to be taken")
        for task in (self._starting, self._leaving):
            if task is not None and task.done():
                task.result()
        if not self.settings.is_healthy:
            raise RuntimeError("the settings are not watched any more")
        if not self.dispatch.is_healthy:
            raise RuntimeError("the dispatcher's housekeeping task has died")

    def _note_restored(self) -> None:
        self.states.start()
        self.restored.set()

    async def _call(self, method: Method, args: tuple[Any, ...]) -> Any:
        return await getattr(self._service_of[method.name], method.name)(*args)

    def _apply(self, settings: Settings) -> None:
        self.dispatch.apply(self.jobs.control.planned(settings))
        self.jobs.apply(settings)

    def _save_worker(self, registration: Registration) -> None:
        # before that the store is another's
        if self._is_started:
            self.jobs.save_worker(registration)


def core_of(config: ClusterConfig, epoch: int = 1, now_s: float = 0.0) -> DispatchCore:
    """Return the dispatch core of a configuration, before its settings are applied."""
    core = DispatchCore(
        limits=config.limits,
        config=config.dispatch,
        configured=lanes_of(config),
        curve_of=_calibrated_curve,
        epoch=epoch,
    )
    if config.loras.num_stores:
        core.loras.expect_stores(now_s + _STORE_STARTS_S)
    return core


async def started_config(
    arguments: FrontArguments, config: ClusterConfig | None
) -> tuple[ClusterConfig, SettingsFile | None]:
    """Return the settings that a front starts with, and the file that it watches for others.

    Args:
        config: the settings; None if they are in the file.

    Raises:
        ConfigError: the file cannot be read, or is wrong.
    """
    if arguments.settings is None:
        assert config is not None, "neither a file nor settings were given"
        return config, None
    folder = None if arguments.folder is None else Path(arguments.folder)
    file = SettingsFile(Path(arguments.settings), folder, check_models)
    if config is None:
        config = await asyncio.to_thread(lambda: file.parse(file.content()))
    return config, file


def _calibrated_curve(cascade: CascadeConfig) -> DeferralCurve | None:
    """Return what a cascade's confidences were calibrated to; None where nobody says."""
    if cascade.curves is None:
        return None
    try:
        return load_curves(cascade.curves).deferral
    except ConfigError as error:
        logger.warning("drift of cascade %s is not measured: %s", cascade.name, error)
        return None
