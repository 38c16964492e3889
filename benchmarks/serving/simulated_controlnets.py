"""A service with ControlNets in the simulator, as fast as steps of the live one were."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ray_cluster.policies.costs.cost_model import (
    TimedStep,
    control_share,
    fitted_cost,
    step_s,
    work_of,
)
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.cell.cell import CellResult, CellSpec, PoolSpec, SimulatedCell
from ray_cluster.simulator.controlnets.add_ons import AddOnCost, Way
from ray_cluster.simulator.controlnets.services import ServiceSpec
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Arrival

MODEL = "model"
# calls at once, by which the simulated throughput is found
_FLOOD = 200


class MeasuredSteps(NamedTuple):
    """Steps of images with equally many ControlNets.

    Attributes:
        mean_batch: images of a step in the mean.
        step_s: seconds of a step in the mean.
    """

    mean_batch: float
    step_s: float


class MeasuredService(NamedTuple):
    """What a live service takes, by the number of ControlNets of an image.

    Attributes:
        alone: steps of one image after the other.
        together: steps of many images at once.
        decode_s: of an image alone.
        other_s: of an image alone, from the call to the reply, but for its steps and its decoding.
    """

    side_px: int
    num_steps: int
    alone: Mapping[int, MeasuredSteps]
    together: Mapping[int, MeasuredSteps]
    decode_s: float
    other_s: float

    def view(self, controls: Sequence[str] = ()) -> RequestView:
        """Return a request with guidance."""
        side = self.side_px
        return RequestView(
            "", MODEL, side, side, self.num_steps, True, 0, 0.0, 0.0, controls=tuple(controls)
        )

    def between(self, later: MeasuredService) -> MeasuredService:
        """Return the means of this and a later measurement."""

        def mean(one: MeasuredSteps, other: MeasuredSteps) -> MeasuredSteps:
            pairs = zip(one, other, strict=True)
            return MeasuredSteps(*((first + second) / 2 for first, second in pairs))

        return self._replace(
            alone={key: mean(one, later.alone[key]) for key, one in self.alone.items()},
            together={key: mean(one, later.together[key]) for key, one in self.together.items()},
            decode_s=(self.decode_s + later.decode_s) / 2,
            other_s=(self.other_s + later.other_s) / 2,
        )

    def drift(self, later: MeasuredService) -> float:
        """Return how many times as long steps take in a later measurement, in the geometric mean.

        An image of a step is what is compared: batches are never quite as large again.
        """
        pairs = [(self.alone[key], later.alone[key]) for key in self.alone]
        pairs += [(self.together[key], later.together[key]) for key in self.together]
        each = [(b.step_s / b.mean_batch) / (a.step_s / a.mean_batch) for a, b in pairs]
        return math.prod(each) ** (1 / len(each))

    def slowed(self, times: float) -> MeasuredService:
        """Return it with everything so many times as long."""
        alone, together = (
            {key: one._replace(step_s=times * one.step_s) for key, one in steps.items()}
            for steps in (self.alone, self.together)
        )
        decode_s, other_s = times * self.decode_s, times * self.other_s
        return self._replace(alone=alone, together=together, decode_s=decode_s, other_s=other_s)

    @property
    def alone_s(self) -> float:
        """Seconds of an image without ControlNets on an idle service."""
        return self.other_s + self.num_steps * self.alone[0].step_s + self.decode_s

    @property
    def cost(self) -> StepCost:
        """What steps without ControlNets cost."""
        one, many = self.alone[0], self.together[0]
        per_image_s = (many.step_s - one.step_s) / (many.mean_batch - one.mean_batch)
        plain = fitted_cost(
            (self.side_px, self.side_px),
            alone_s=one.step_s,
            together_s=one.step_s + per_image_s,
            num_together=2,
        )
        megapixels = self.side_px**2 / 1e6
        # with guidance an image is two rows
        return StepCost(
            plain.fixed_s,
            plain.per_megapixel_s / 2,
            decode_per_megapixel_s=self.decode_s / megapixels,
        )

    def _plain_s(self, mean_batch: float) -> float:
        alone = step_s(self.cost, work_of([self.view()]))
        return alone + (mean_batch - 1) * (alone - self.cost.fixed_s)

    @property
    def reported_share(self) -> float:
        """What a ControlNet adds, as replicas learn it from such steps."""
        found = []
        for by_number in (self.alone, self.together):
            for number in (1, 2):
                steps = by_number[number]
                work = work_of([self.view([str(place) for place in range(number)])])
                # of one image, beside the others
                others_s = self._plain_s(steps.mean_batch) - self._plain_s(1.0)
                each_s = (steps.step_s - others_s - self._plain_s(1.0)) / steps.mean_batch
                found.append(TimedStep(work, self._plain_s(1.0) + each_s))
        return control_share(self.cost, found)

    def add_ons(self) -> AddOnCost:
        """Return what a ControlNet on a device of its own takes, by steps with one of them.

        How much of a step is its first half makes no difference to steps without a queue.
        """
        half = Way().half_share

        def answer_s(steps: MeasuredSteps) -> float:
            return max(0.0, steps.step_s - (1 - half) * self._plain_s(steps.mean_batch))

        one, many = self.alone[1], self.together[1]
        longer_s = self._plain_s(many.mean_batch) - self._plain_s(one.mean_batch)
        share = max(0.0, (answer_s(many) - answer_s(one)) / longer_s)
        transport_s = max(0.0, answer_s(one) - share * self._plain_s(one.mean_batch))
        return AddOnCost(
            controlnet_share=share,
            controlnet_fetch_s=0.0,
            way=Way(half_share=half, transport_s=transport_s),
        )


class PlannedCall(NamedTuple):
    """A call for one image, with ControlNets by name."""

    at_s: float
    controls: tuple[str, ...]
    slo_s: float


def slowdown(
    simulated: Callable[[Sequence[PlannedCall]], CellResult],
    kinds: Sequence[tuple[str, ...]],
    per_s: float,
) -> float:
    """Return how many times as long everything takes in the mix as measured kind by kind.

    The simulator gives every process a core; on a machine with fewer cores than busy processes the
    mix takes longer. That is what the throughput of the mix tells, in which no deadline has a part.

    Args:
        simulated: the service with the steps of each kind.
        kinds: of the calls, in equal shares.
        per_s: images per second that many clients got of them.
    """
    calls = [PlannedCall(0.0, kinds[place % len(kinds)], 1e6) for place in range(_FLOOD)]
    result = simulated(calls)
    return _FLOOD / max(fate.end_s for fate in result.fates) / per_s


def simulate(
    service: MeasuredService, calls: Sequence[PlannedCall], *, num_services: int, max_batch: int
) -> CellResult:
    """Simulate one replica and services of ControlNets under calls that refuse to be late."""
    add_ons, cost = service.add_ons(), service.cost
    arrivals = [
        Arrival(
            one.at_s,
            MODEL,
            service.side_px,
            service.side_px,
            service.num_steps,
            slo_s=one.slo_s,
            controlnets=one.controls,
        )
        for one in calls
    ]
    reported = replace(cost, control_share=service.reported_share)
    pool = PoolSpec(
        "pool",
        MODEL,
        1,
        Hardware(cost, encode_s=service.other_s, add_ons=add_ons),
        max_batch,
        max_batch,
        reported_cost=reported,
    )
    services = ServiceSpec(num_services, cost, add_ons, max_batch)
    spec = CellSpec((pool,), when_late="refuse", has_preemption=True, services=services)
    return SimulatedCell(spec).run(arrivals)
