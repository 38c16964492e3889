"""What ControlNets and LoRAs cost in the simulation: steps of ControlNets, and transfers of both.

All figures are published ones of SDXL (SwiftDiffusion, its text and its logs). Not priced, for want
of figures: what LoRAs add to a step, what merging them takes, and the memory that add-ons need.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ray_cluster.policies.cost_model import step_s, work_of
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.workload import ADAPTER_POOR, SERVICE_A, SERVICE_B, AddOns, ArrivalOf

MixName = Literal["none", "service-a", "service-b", "adapter-poor"]

# seconds of an image of 1024 px without and with three ControlNets (H800, diffusers); the one with
# a single ControlNet, 4.26 s, is within 1 % of the line through them
_WITHOUT_S, _WITH_THREE_S = 2.88, 7.09
# a LoRA of 341 to 456 MiB and a ControlNet of 3 GiB, at 1 GiB/s
_LORA_S = (341 + 456) / 2 / 1024
_CONTROLNET_S = 3.0


@dataclass(frozen=True, slots=True)
class AddOnMix:
    """Which add-ons the requests of a service have; None for none of a sort."""

    controlnets: AddOns | None = None
    loras: AddOns | None = None


MIXES: Mapping[MixName, AddOnMix] = {
    "none": AddOnMix(),
    "service-a": AddOnMix(*SERVICE_A),
    "service-b": AddOnMix(*SERVICE_B),
    "adapter-poor": AddOnMix(None, *ADAPTER_POOR),
}


@dataclass(frozen=True, slots=True)
class AddOnCost:
    """What add-ons cost on a device.

    Attributes:
        controlnet_share: time of a ControlNet for some rows, over a step of these rows alone.
            Published for a batch of one; that it holds for batches is an assumption.
        controlnet_fetch_s: seconds to fetch a ControlNet.
        lora_fetch_s: seconds to fetch a LoRA.
        num_kept: most recently used add-ons of each sort that a replica keeps.
    """

    controlnet_share: float = (_WITH_THREE_S - _WITHOUT_S) / 3 / _WITHOUT_S
    controlnet_fetch_s: float = _CONTROLNET_S
    lora_fetch_s: float = _LORA_S
    num_kept: int = 10


class AddOnStore:
    """The add-ons that one replica has, and the link over which it fetches others.

    Args:
        cost: of add-ons.
        arrival_of: a leased request, by its id.
    """

    def __init__(self, cost: AddOnCost, arrival_of: ArrivalOf) -> None:
        self._cost = cost
        self._arrival_of = arrival_of
        self._controlnets_of: dict[str, tuple[str, ...]] = {}
        self._kept: tuple[OrderedDict[str, float], ...] = (OrderedDict(), OrderedDict())
        self._link_free_s = 0.0

    def ready_s(self, request_id: str, now_s: float) -> float:
        """Return the instant at which all add-ons of a request are there, fetched one at a time."""
        arrival = self._arrival_of(request_id)
        if arrival.controlnets:
            self._controlnets_of[request_id] = arrival.controlnets
        sorts = (
            (arrival.controlnets, self._cost.controlnet_fetch_s),
            (arrival.loras, self._cost.lora_fetch_s),
        )
        there_s = [
            self._there_s(kept, name, fetch_s, now_s)
            for kept, (names, fetch_s) in zip(self._kept, sorts, strict=True)
            for name in names
        ]
        return max([now_s, *there_s])

    def _there_s(
        self, kept: OrderedDict[str, float], name: str, fetch_s: float, now_s: float
    ) -> float:
        there_s = kept.pop(name, None)
        if there_s is None:
            there_s = self._link_free_s = max(now_s, self._link_free_s) + fetch_s
        kept[name] = there_s
        if len(kept) > self._cost.num_kept:
            kept.popitem(last=False)
        return there_s

    def step_s(self, cost: StepCost, requests: Sequence[RequestView]) -> float:
        """Return the seconds that the ControlNets of a batch add to a step of it.

        Requests with the same ControlNet go through it together.
        """
        rows_of: defaultdict[str, list[RequestView]] = defaultdict(list)
        for one in requests:
            for name in self._controlnets_of.get(one.request_id, ()):
                rows_of[name].append(one)
        share = self._cost.controlnet_share
        return sum(share * step_s(cost, work_of(rows)) for rows in rows_of.values())


def mean_step_factor(cost: AddOnCost, wanted: Iterable[int]) -> float:
    """Return how much longer a step is on average, alone, than without ControlNets.

    Args:
        cost: of add-ons.
        wanted: number of ControlNets of each request.
    """
    counts = list(wanted)
    return 1 + cost.controlnet_share * sum(counts) / max(1, len(counts))
