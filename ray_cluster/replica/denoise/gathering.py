"""What a replica fetches for a request before its first step here: state, image, LoRAs, maps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.step.state import RequestState
from ray_cluster.imaging.templates import EditPixels
from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.leases import Directory, Lease
from ray_cluster.replica.delivery import Delivery
from ray_cluster.replica.denoise.lora_shelf import LoraShelf
from ray_cluster.replica.state_transfer import StateTransfer
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
        states: StateTransfer,
        add_ons: ReplicaAddOns,
        clock: Callable[[], float],
    ) -> None:
        self._delivery = delivery
        self._states = states
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
