"""The Dispatcher deployment: exactly one per cell.

Duties: host the cell's front on its event loop; serve gateways and replicas without Serve in
between; pass metrics on to Ray; report its health, and storage that other nodes cannot reach.
"""

from __future__ import annotations

import asyncio
import time

from ray.util import get_node_ip_address

from ray_cluster.cell.front import Front, Identity, Stores, started_config
from ray_cluster.cell.live_settings import SettingsReport
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.slices import FrontArguments
from ray_cluster.deployments.actors import (
    NodeWatch,
    RayMetrics,
    cell_id,
    refuse_local_storage,
    set_up_actor_logs,
)
from ray_cluster.dispatch.reports.snapshots import ClusterSnapshot
from ray_cluster.protocol.calling.rpc import RpcServer
from ray_cluster.protocol.leases import Endpoint, Registration


class Dispatcher:
    """Hosts the front of a cell.

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
        config, file = await started_config(arguments, config)
        self._front = Front(
            arguments,
            config,
            await asyncio.to_thread(Stores.open, storage),
            identity=Identity(cell_id(), time.time_ns()),
            file=file,
        )
        self._ray_metrics = RayMetrics(self._front.cell.own_metrics)
        await self._front.begin()
        self._ray_metrics.start()
        self._nodes = NodeWatch(storage)
        self._nodes.start()
        self._server = RpcServer(self._front.services)
        self._address = await self._server.start(get_node_ip_address(), arguments.dispatch.port)

    async def address(self) -> Endpoint:
        """Return where this dispatcher listens."""
        return self._address

    async def close_admission(self) -> None:
        """See :meth:`DispatchService.close_admission`."""
        await self._front.dispatch.close_admission()

    async def end_attached(self) -> None:
        """See :meth:`DispatchService.end_attached`."""
        await self._front.dispatch.end_attached()

    async def snapshot(self) -> ClusterSnapshot:
        """See :meth:`DispatchService.snapshot`."""
        return await self._front.dispatch.snapshot()

    async def registrations(self) -> tuple[Registration, ...]:
        """Return what the live workers have registered as."""
        return tuple(one.registration for one in self._front.core.replicas)

    async def note_undeployed(self, pools: tuple[str, ...]) -> None:
        """See :meth:`LiveSettings.note_undeployed`."""
        self._front.settings.note_undeployed(pools)

    async def settings_report(self) -> SettingsReport:
        """Return the settings in force, and the version of each process."""
        return self._front.settings.report()

    async def write_settings(self, text: str) -> str:
        """See :meth:`LiveSettings.write`."""
        return await self._front.settings.write(text)

    async def check_health(self) -> None:
        """Raise when the front has to be replaced, so that Serve starts a new dispatcher."""
        self._front.check_health()

    async def __del__(self) -> None:
        """Let the next dispatcher have the job store at once; Serve awaits this when it stops."""
        if hasattr(self, "_front"):
            await self._front.stop()
