"""The Dispatcher deployment: exactly one per cell.

Duties: own the dispatch and job services on its event loop; watch the settings' file and apply
changes; restore open jobs; delete the states that no replica deletes, and the inputs that no
request uses; serve gateways and replicas without Serve in between; pass metrics on to Ray; report
its health, and storage that other nodes cannot reach.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from ray.util import get_node_ip_address

from ray_cluster.config.arguments import FrontArguments
from ray_cluster.config.cascades import CascadeConfig
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.settings import Settings
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.deployments.actors import (
    NodeWatch,
    RayMetrics,
    cell_id,
    refuse_local_storage,
    set_up_actor_logs,
)
from ray_cluster.deployments.live_settings import LiveSettings, SettingsReport
from ray_cluster.dispatch.candidates import Candidates
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.dispatch.snapshots import ClusterSnapshot
from ray_cluster.dispatch.state_sweeper import StateSweeper
from ray_cluster.errors import ConfigError
from ray_cluster.jobs.cell import CellService
from ray_cluster.jobs.service import JobService
from ray_cluster.jobs.sql_store import SqlJobStore
from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.models.local import check_models
from ray_cluster.observability.metrics_snapshot import MetricsBook
from ray_cluster.policies.cascade import DeferralCurve
from ray_cluster.protocol.control import ControlCalls, PlanCalls
from ray_cluster.protocol.dispatcher import (
    CellCalls,
    DispatcherLink,
    ImageCalls,
    JobCalls,
    LoraCalls,
)
from ray_cluster.protocol.leases import Endpoint, Registration
from ray_cluster.protocol.rpc import RpcServer
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore

logger = logging.getLogger(__name__)

# of a process that reports its metrics every few seconds
_SILENCE_S = 30.0
# within which a store of LoRAs registers, on a busy machine too
_STORE_STARTS_S = 60.0


class Dispatcher:
    """Owns the services of a cell.

    Args:
        config: the settings, where no file is watched for them.
    """

    # Serve awaits the constructor: nothing is asked of a dispatcher before its jobs are back
    async def __init__(  # type: ignore[misc]
        self, arguments: FrontArguments, config: ClusterConfig | None
    ) -> None:
        set_up_actor_logs(arguments.logs)
        storage = arguments.storage
        await asyncio.to_thread(refuse_local_storage, storage)
        file = _settings_file(arguments)
        if config is None:
            assert file is not None, "neither a file nor settings were given"
            config = await asyncio.to_thread(lambda: file.parse(file.content()))
        core = _new_core(config)
        if config.loras.num_stores:
            core.loras.expect_stores(time.monotonic() + _STORE_STARTS_S)
        self._states = StateSweeper(
            await asyncio.to_thread(BlobStore, storage.states),
            knows=core.knows,
            note_stored=core.note_stored,
            wall_clock=time.time,
        )
        book, results = MetricsBook(_SILENCE_S), await asyncio.to_thread(BlobStore, storage.results)
        self._service = DispatchService(
            core,
            config=config.dispatch,
            clock=time.monotonic,
            on_outcome=self._states.on_outcome,
            candidates=Candidates(results),
            on_metrics=lambda replica, own: book.update(replica, own, time.monotonic()),
            on_register=self._save_worker,
        )
        self._jobs = await self._open_jobs(arguments, results, config)
        # before anything is read or written
        await self._jobs.ownership.take()
        keys = self._jobs.known_keys
        self._settings = LiveSettings(arguments, config, file, core, time.monotonic, keys)
        cell = CellService(
            self._service,
            self._jobs,
            book,
            self._settings.book,
            clock=time.monotonic,
            notices=self._settings.warnings,
            undeployed=self._settings.undeployed,
        )
        self._ray_metrics = RayMetrics(cell.own_metrics)
        await self._settings.start(self._apply)
        # not before the open jobs are known
        self._jobs.on_restored = self._states.start
        await self._jobs.start()
        self._ray_metrics.start()
        self._nodes = NodeWatch(storage)
        self._nodes.start()
        self._server = self._new_server(cell)
        self._address = await self._server.start(get_node_ip_address(), arguments.dispatch.port)

    def _new_server(self, cell: CellService) -> RpcServer:
        return RpcServer(
            {
                ImageCalls: self._service,
                JobCalls: self._jobs,
                CellCalls: cell,
                LoraCalls: self._jobs.loras,
                DispatcherLink: self._service,
                ControlCalls: self._jobs.control,
                PlanCalls: self._jobs.control,
            }
        )

    async def _open_jobs(
        self, arguments: FrontArguments, results: BlobStore, config: ClusterConfig
    ) -> JobService:
        storage = arguments.storage
        jobs = JobService(
            self._service,
            await asyncio.to_thread(SqlJobStore.open, storage.jobs),
            results,
            await asyncio.to_thread(
                InputStore.open, storage.inputs, grace_s=storage.inputs_grace_s
            ),
            config=config.storage,
            max_open_per_client=config.limits.max_open_jobs_per_client,
            wall_clock=time.time,
            lora_sources=arguments.loras.sources,
        )
        jobs.ownership.cell = cell_id()
        jobs.control.is_enabled = arguments.control.enabled
        return jobs

    def _apply(self, settings: Settings) -> None:
        self._service.apply(self._jobs.control.planned(settings))
        self._jobs.apply(settings)

    def _save_worker(self, registration: Registration) -> None:
        self._jobs.save_worker(registration)

    async def address(self) -> Endpoint:
        """Return where this dispatcher listens."""
        return self._address

    async def close_admission(self) -> None:
        """See :meth:`DispatchService.close_admission`."""
        await self._service.close_admission()

    async def end_attached(self) -> None:
        """See :meth:`DispatchService.end_attached`."""
        await self._service.end_attached()

    async def snapshot(self) -> ClusterSnapshot:
        """See :meth:`DispatchService.snapshot`."""
        return await self._service.snapshot()

    async def note_undeployed(self, pools: tuple[str, ...]) -> None:
        """See :meth:`LiveSettings.note_undeployed`."""
        self._settings.note_undeployed(pools)

    async def settings_report(self) -> SettingsReport:
        """Return the settings in force, and the version of each process."""
        return self._settings.report()

    async def write_settings(self, text: str) -> str:
        """See :meth:`LiveSettings.write`."""
        return await self._settings.write(text)

    async def check_health(self) -> None:
        """Raise when housekeeping has died, so that Serve starts a new dispatcher."""
        if self._jobs.ownership.is_lost:
            raise RuntimeError("another dispatcher has taken the job store")
        if not self._settings.is_healthy:
            raise RuntimeError("the settings are not watched any more")
        if not self._service.is_healthy:
            raise RuntimeError("the dispatcher's housekeeping task has died")

    async def __del__(self) -> None:
        """Let the next dispatcher have the job store at once; Serve awaits this when it stops."""
        if hasattr(self, "_jobs"):
            await self._jobs.close()


def _settings_file(arguments: FrontArguments) -> SettingsFile | None:
    if arguments.settings is None:
        return None
    folder = None if arguments.folder is None else Path(arguments.folder)
    return SettingsFile(Path(arguments.settings), folder, check_models)


def _new_core(config: ClusterConfig) -> DispatchCore:
    return DispatchCore(
        limits=config.limits,
        config=config.dispatch,
        configured=[pool.model_name for pool in config.pools],
        curve_of=calibrated_curve,
        # an epoch must be new in every life of the dispatcher
        epoch=time.time_ns(),
    )


def calibrated_curve(cascade: CascadeConfig) -> DeferralCurve | None:
    """Return what a cascade's confidences were calibrated to; None where nobody says."""
    if cascade.curves is None:
        return None
    try:
        return load_curves(cascade.curves).deferral
    except ConfigError as error:
        logger.warning("drift of cascade %s is not measured: %s", cascade.name, error)
        return None
