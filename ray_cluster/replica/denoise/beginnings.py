"""How a replica begins with leases: what they need is fetched, then the runner gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.stages.runner import EngineRunner
from ray_cluster.engine.step.state import RequestState
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.leases import Directory, Lease
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.denoise.late_loras import LateLoras, begins_without
from ray_cluster.replica.denoise.lora_shelf import LoraShelf
from ray_cluster.replica.denoise.metrics import ReplicaMetrics
from ray_cluster.replica.log import ReplicaLog
from ray_cluster.replica.states.transfer import StateTransfer
from ray_cluster.replica.unexpected import failing_alone
from ray_cluster.requests import AddOns


class ControlNetPeers(Protocol):
    """The part of :class:`~ray_cluster.replica.controlnet.client.RemoteControlNets` that is used
    here."""

    def set_peers(self, directory: Directory) -> None: ...

    def call_when_overdue(self, report: Callable[[str], None]) -> None: ...

    def metrics(self) -> Snapshot: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReplicaAddOns:
    """What a replica has for requests with add-ons.

    Attributes:
        loras: those in memory; None where no request may name one.
        controls: ControlNets in other processes; None where there are none.
    """

    loras: LoraShelf | None = None
    controls: ControlNetPeers | None = None

    @property
    def residents(self) -> tuple[str, ...]:
        """Ids of what is in memory."""
        return () if self.loras is None else self.loras.residents

    def metrics(self) -> Snapshot:
        """Return what has been measured of add-ons so far."""
        return () if self.controls is None else self.controls.metrics()

    def set_peers(self, directory: Directory) -> None:
        """Note which workers may be called."""
        if self.controls is not None:
            self.controls.set_peers(directory)

    def call_when_overdue(self, report: Callable[[str], None]) -> None:
        """Have something called on the running loop with the id of a request that waits too long.

        A ControlNet that it needs has no replica.
        """
        if self.controls is not None:
            loop = asyncio.get_running_loop()

            def report_there(request_id: str) -> None:
                loop.call_soon_threadsafe(report, request_id)

            self.controls.call_when_overdue(report_there)

    def close(self) -> None:
        """Call no others any more."""
        if self.controls is not None:
            self.controls.close()


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was fetched for a request.

    Attributes:
        state: to go on from; None to begin.
        pixels: of an edit that begins.
        adapters: of its LoRAs.
        maps: of its ControlNets.
        took_s: seconds that fetching has taken.
    """

    state: RequestState | None = None
    pixels: EditPixels | None = None
    adapters: AdapterSet | None = None
    maps: tuple[Tensor, ...] = ()
    took_s: float = 0.0


class Gathering:
    """Fetches what requests need."""

    def __init__(
        self,
        delivery: Delivery,
        add_ons: ReplicaAddOns,
        clock: Callable[[], float],
    ) -> None:
        self._delivery = delivery
        self._loras = add_ons.loras
        self._clock = clock

    @staticmethod
    def is_needed(lease: Lease) -> bool:
        """Whether a request needs anything."""
        request = lease.request
        return lease.may_resume or request.edit is not None or request.add_ons != AddOns()

    async def gather(
        self, lease: Lease, state: RequestState | None, *, without_loras: bool = False
    ) -> Gathered:
        """Fetch what a request needs beside its state.

        Args:
            without_loras: whether these may come later.

        Raises:
            RequestFailed: something cannot be had.
        """
        began_s, request = self._clock(), lease.request
        pixels = adapters = None
        maps: tuple[Tensor, ...] = ()
        if state is None and request.edit is not None:
            pixels = await self._delivery.pixels(request)
        if request.add_ons.controls:
            maps = await self._delivery.control_maps(request)
        if self._loras is not None and not without_loras:
            adapters = await self._loras.adapters(lease)
        return Gathered(state, pixels, adapters, maps, self._clock() - began_s)


class Beginnings:
    """Fetches what leases need, and submits them to the runner; a lease that fails, fails alone.

    Args:
        late_loras: for those that begin without their LoRAs; None where there are none.
        on_failed: called with a lease that cannot begin, and why.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        runner: EngineRunner,
        states: StateTransfer,
        gathering: Gathering,
        late_loras: LateLoras | None,
        *,
        on_failed: Callable[[Lease, RequestFailed | InvalidRequest], None],
        log: ReplicaLog,
        metrics: ReplicaMetrics,
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._states = states
        self._gathering = gathering
        self._late_loras = late_loras
        self._on_failed = on_failed
        self._log = log
        self._metrics = metrics
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def ids(self) -> Collection[str]:
        """Requests whose needs are fetched."""
        return self._tasks.keys()

    @property
    def tasks(self) -> Collection[asyncio.Task[None]]:
        """The fetches under way."""
        return self._tasks.values()

    def begin(self, lease: Lease) -> None:
        """Begin with a lease: at once if it needs nothing."""
        deadline_s = self._clock() + lease.deadline_in_s
        if self._gathering.is_needed(lease):
            task = asyncio.create_task(self._fetch(lease, deadline_s))
            self._tasks[lease.request.request_id] = task
            return
        try:
            with failing_alone(lease.request):
                self._submit(lease, deadline_s, Gathered())
        except (RequestFailed, InvalidRequest) as error:
            self._fail(lease, error)

    def cancel(self, request_id: str) -> bool:
        """End the fetch of a request's needs; return whether there was one."""
        if (task := self._tasks.pop(request_id, None)) is None:
            return False
        task.cancel()
        return True

    async def _fetch(self, lease: Lease, deadline_s: float) -> None:
        try:
            with failing_alone(lease.request):
                gathered, is_late = await self._gathered(lease)
                del self._tasks[lease.request.request_id]
                self._submit(lease, deadline_s, gathered)
                if is_late and self._late_loras is not None:
                    self._late_loras.begin(lease, deadline_s)
        except (RequestFailed, InvalidRequest) as error:
            self._tasks.pop(lease.request.request_id, None)
            self._fail(lease, error)

    async def _gathered(self, lease: Lease) -> tuple[Gathered, bool]:
        """Return what a request needs, and whether its LoRAs come later."""
        began_s, state = self._clock(), None
        if lease.may_resume:
            state = await self._states.load(lease.request, self._runner.device)
        if state is not None:
            self._metrics.resumed(state.step_index)
        is_late = self._late_loras is not None and begins_without(lease.request, state)
        gathered = await self._gathering.gather(lease, state, without_loras=is_late)
        return replace(gathered, took_s=self._clock() - began_s), is_late

    def _submit(self, lease: Lease, deadline_s: float, gathered: Gathered) -> None:
        self._log.started(lease, gathered.state)
        self._runner.submit(
            lease.request,
            deadline_s=deadline_s,
            queued_s=lease.queued_s,
            read_s=gathered.took_s,
            state=gathered.state,
            pixels=gathered.pixels,
            adapters=gathered.adapters,
            maps=gathered.maps,
        )

    def _fail(self, lease: Lease, error: RequestFailed | InvalidRequest) -> None:
        # it may be there already
        self._runner.abort(lease.request.request_id)
        self._on_failed(lease, error)
