"""How a replica begins with leases: what they need is fetched, then the runner gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.step.state import RequestState
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.edit_images import SentPixels
from ray_cluster.protocol.leases import Lease
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.denoise.endings import Endings
from ray_cluster.replica.denoise.late_loras import LateLoras
from ray_cluster.replica.denoise.metrics import ReplicaMetrics
from ray_cluster.replica.denoise.runs import Runs
from ray_cluster.replica.log import ReplicaLog
from ray_cluster.replica.states.transfer import StateTransfer
from ray_cluster.replica.unexpected import failing_alone
from ray_cluster.requests import AddOns, ImageRequest


@dataclass(frozen=True, slots=True)
class Gathered:
    """What was fetched for a request.

    Attributes:
        state: to go on from; None to begin.
        pixels: that one is made from that begins.
        adapters: of its LoRAs.
        maps: of its ControlNets.
        took_s: seconds that fetching has taken.
    """

    state: RequestState | None = None
    pixels: SentPixels | None = None
    adapters: AdapterSet | None = None
    maps: tuple[Tensor, ...] = ()
    took_s: float = 0.0


class Beginnings:
    """Fetches what leases need, and submits them to the runner; a lease that fails, fails alone.

    Args:
        late_loras: has the LoRAs of all; None where no request may name one.
    """

    def __init__(
        self,
        runner: Runs,
        states: StateTransfer,
        delivery: Delivery,
        late_loras: LateLoras | None,
        *,
        endings: Endings,
        log: ReplicaLog,
        metrics: ReplicaMetrics,
    ) -> None:
        self._runner = runner
        self._states = states
        self._delivery = delivery
        self._late_loras = late_loras
        self._endings = endings
        self._log = log
        self._metrics = metrics
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
        deadline_s = self._runner.clock() + lease.deadline_in_s
        if self._is_needed(lease):
            task = asyncio.create_task(self._fetch(lease, deadline_s))
            self._tasks[lease.request.request_id] = task
            return
        try:
            with failing_alone(lease.request):
                self._submit(lease, deadline_s, Gathered())
        except (RequestFailed, InvalidRequest) as error:
            self._fail(lease, error)

    @staticmethod
    def _is_needed(lease: Lease) -> bool:
        """Whether anything is to be fetched for a request."""
        request = lease.request
        return lease.may_resume or bool(request.inputs) or request.add_ons != AddOns()

    def cancel(self, request_id: str) -> bool:
        """End the fetch of a request's needs; return whether there was one."""
        if (task := self._tasks.pop(request_id, None)) is None:
            return False
        task.cancel()
        return True

    async def _fetch(self, lease: Lease, deadline_s: float) -> None:
        try:
            with failing_alone(lease.request):
                gathered, is_late = await self._gather(lease)
                del self._tasks[lease.request.request_id]
                self._submit(lease, deadline_s, gathered)
                if is_late and self._late_loras is not None:
                    self._late_loras.begin(lease, deadline_s)
        except (RequestFailed, InvalidRequest) as error:
            self._tasks.pop(lease.request.request_id, None)
            self._fail(lease, error)

    async def _gather(self, lease: Lease) -> tuple[Gathered, bool]:
        """Fetch what a request needs; return it, and whether its LoRAs come later.

        Raises:
            RequestFailed: something cannot be had.
        """
        request, began_s = lease.request, self._runner.clock()
        state, pixels, adapters = None, None, None
        maps: tuple[Tensor, ...] = ()
        if lease.may_resume:
            state = await self._states.load(request, self._runner.device)
        if state is not None:
            self._metrics.resumed(state.step_index)
        if state is None and (request.edit is not None or request.references):
            pixels = await self._delivery.sent(request)
        if request.add_ons.controls:
            maps = await self._delivery.control_maps(request)
        is_late = self._late_loras is not None and _begins_without(request, state)
        if self._late_loras is not None and not is_late:
            adapters = await self._late_loras.shelf.adapters(lease)
        return Gathered(state, pixels, adapters, maps, self._runner.clock() - began_s), is_late

    def _submit(self, lease: Lease, deadline_s: float, gathered: Gathered) -> None:
        state = gathered.state
        self._log.started(lease, 0 if state is None else state.step_index)
        self._runner.submit(
            lease.request,
            deadline_s=deadline_s,
            queued_s=lease.queued_s,
            read_s=gathered.took_s,
            state=state,
            pixels=gathered.pixels,
            adapters=gathered.adapters,
            maps=gathered.maps,
        )

    def _fail(self, lease: Lease, error: RequestFailed | InvalidRequest) -> None:
        # it may be there already
        self._runner.abort(lease.request.request_id)
        self._endings.fail(lease, error)


def _begins_without(request: ImageRequest, state: RequestState | None) -> bool:
    """Whether a request's next step is, or may be, without its LoRAs.

    Args:
        state: that it goes on from; None if it begins.
    """
    return request.add_ons.lora_start_step > 0 if state is None else state.lacks_loras
