"""What ControlNets and LoRAs cost in the simulation: steps of ControlNets, and transfers of both.

All figures are published ones of SDXL (SwiftDiffusion, its text and its logs). Not priced, for want
of figures: what LoRAs add to a step, what merging them takes, and the memory that add-ons need.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ray_cluster.policies.costs.cost_model import TimedStep, control_share, step_s, work_of
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.workload import ADAPTER_POOR, SERVICE_A, SERVICE_B, AddOns, ArrivalOf

MixName = Literal["none", "service-a", "service-b", "adapter-poor"]

# seconds of an image of 1024 px without and with three ControlNets (H800, diffusers); the one with
# a single ControlNet, 4.26 s, is within 1 % of the line through them
_WITHOUT_S, _WITH_THREE_S = 2.88, 7.09
CONTROLNET_SHARE = (_WITH_THREE_S - _WITHOUT_S) / 3 / _WITHOUT_S
# a LoRA of 341 to 456 MiB and a ControlNet of 3 GiB, at 1 GiB/s
_LORA_S = (341 + 456) / 2 / 1024
_CONTROLNET_S = 3.0
# a name: which one it is makes no difference
_ANY = "any"


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
        num_kept: most recently used add-ons of each sort that a device keeps.
        way: to ControlNets on devices of their own; None where each replica has its own.
    """

    controlnet_share: float = CONTROLNET_SHARE
    controlnet_fetch_s: float = _CONTROLNET_S
    lora_fetch_s: float = _LORA_S
    num_kept: int = 10
    way: Way | None = None

    def controlled_s(self, cost: StepCost, rows: Sequence[RequestView]) -> float:
        return self.controlnet_share * step_s(cost, work_of(rows))


@dataclass(frozen=True, slots=True)
class Way:
    """What lies between a replica and ControlNets on other devices.

    Attributes:
        half_share: of a step before residuals are needed. Published is that a ControlNet takes 1.1
            of that half.
        transport_s: seconds of a row's latents there and its residuals back.
    """

    half_share: float = CONTROLNET_SHARE / 1.1
    transport_s: float = 0.0


class Kept:
    """What a device has of one sort of add-ons; what it lacks comes over a link.

    Args:
        num_kept: most recently used ones that it keeps.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._there_s: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        return name in self._there_s

    def __len__(self) -> int:
        return len(self._there_s)

    def there_s(self, name: str, fetch_s: float, link: FetchLink, now_s: float) -> float:
        """Return the instant at which one is there; it is the most recently used now."""
        there_s = self._there_s.pop(name, None)
        if there_s is None:
            there_s = link.fetched_s(fetch_s, now_s)
        self._there_s[name] = there_s
        if len(self._there_s) > self._num_kept:
            self._there_s.popitem(last=False)
        return there_s


class FetchLink:
    """Fetches one add-on after the other."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def fetched_s(self, fetch_s: float, now_s: float) -> float:
        """Return the instant at which what is wanted now is there."""
        self._free_s = max(now_s, self._free_s) + fetch_s
        return self._free_s


class AddOnStore:
    """The add-ons that one replica has, and the link over which it fetches others.

    Args:
        cost: of add-ons.
        arrival_of: a leased request, by its id.
    """

    def __init__(self, cost: AddOnCost, arrival_of: ArrivalOf) -> None:
        self._cost = cost
        self._arrival_of = arrival_of
        self._controlnets, self._loras = Kept(cost.num_kept), Kept(cost.num_kept)
        self._link = FetchLink()

    def ready_s(self, request_id: str, now_s: float) -> float:
        """Return the instant at which all add-ons of a request are there, fetched one at a time."""
        arrival, cost = self._arrival_of(request_id), self._cost
        sorts = [(self._loras, arrival.loras, cost.lora_fetch_s)]
        if cost.way is None:
            sorts.insert(0, (self._controlnets, arrival.controlnets, cost.controlnet_fetch_s))
        there_s = [
            kept.there_s(name, fetch_s, self._link, now_s)
            for kept, names, fetch_s in sorts
            for name in names
        ]
        return max([now_s, *there_s])

    def step_s(self, cost: StepCost, requests: Sequence[RequestView]) -> float:
        """Return the seconds that the ControlNets of a batch add to a step of it here.

        Requests with the same ControlNet go through it together.
        """
        if self._cost.way is not None:
            return 0.0
        rows_of: defaultdict[str, list[RequestView]] = defaultdict(list)
        for one in requests:
            for name in one.controls:
                rows_of[name].append(one)
        return sum(self._cost.controlled_s(cost, rows) for rows in rows_of.values())


def reported_share(
    cost: StepCost, add_ons: AddOnCost, examples: Sequence[RequestView], max_batch: int
) -> float:
    """Return what a replica reports that a ControlNet adds, fitted as live ones fit it.

    The steps are those of images of equal size, alone and in a full batch; no service has a queue.

    Args:
        cost: of steps without any.
        examples: a request of each size.
    """
    steps = []
    for one in examples:
        for count in {1, max_batch}:
            rows = [replace(one, controls=(_ANY,))] * count
            plain_s, added_s = step_s(cost, work_of(rows)), add_ons.controlled_s(cost, rows)
            if (way := add_ons.way) is not None:
                added_s = max(0.0, added_s + way.transport_s - way.half_share * plain_s)
            steps.append(TimedStep(work_of(rows), plain_s + added_s))
    return control_share(cost, steps)
