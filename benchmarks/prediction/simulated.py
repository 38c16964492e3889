"""The study on simulated replicas with a known cost, whose steps vary by a CV of 5 %."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.prediction.study import Ended, Mix, Planned, draw_trace, figures
from ray_cluster.policies.costs.cost_model import StepWork, decode_s, step_s, work_of
from ray_cluster.policies.types import RequestView, StepCost, WhenLate
from ray_cluster.simulator.cell.cell import CellSpec, PoolSpec, SimulatedCell
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Arrival

_NOISE_CV = 0.05
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """Replicas of one cost.

    Attributes:
        encode_s: seconds from a lease until the request can step.
    """

    name: str
    cost: StepCost
    num_replicas: int
    max_batch: int
    max_in_flight: int
    encode_s: float = 0.0

    def alone_s(self, planned: Planned) -> float:
        """Return the seconds of a request on an idle replica."""
        view = _view(planned)
        step = step_s(self.cost, work_of([view]))
        return self.encode_s + planned.num_steps * step + decode_s(self.cost, view)

    def capacity_per_s(self, mix: Mix) -> float:
        """Return the images per second of full batches of all sizes."""
        views = [_view(Planned(0.0, side, 1)) for side in mix.sides_px]
        one = work_of(views)
        share = self.max_batch / len(views)
        full = StepWork(one.megapixels * share, one.squared_megapixels * share, one.num_sizes)
        decodes_s = sum(decode_s(self.cost, view) for view in views) / len(views)
        image_s = mix.mean_steps * step_s(self.cost, full) / self.max_batch + decodes_s
        return self.num_replicas / image_s


# one replica of a model like the bundled one, whose batches save little; and the headlines' pool
POOLS = (
    SimulatedPool("one-cpu", StepCost(0.008, 1.6, 2.0, 0.0, 0.003), 1, 8, 16, encode_s=0.02),
    SimulatedPool("four-h100", StepCost(0.03987, 0.008455), 4, 12, 12),
)
MIXES = {
    "one-cpu": (Mix("equal", (64, 96, 128), (20, 20)), Mix("mixed", (64, 96, 128), (10, 30))),
    "four-h100": (
        Mix("equal", (512, 768, 1024), (50, 50)),
        Mix("mixed", (512, 768, 1024), (25, 75)),
    ),
}


def simulate(pool: SimulatedPool, mix: Mix, load: float, count: int, seed: int) -> dict[str, Any]:
    """Return the figures of one simulated trace."""
    rate = load * pool.capacity_per_s(mix)
    trace = draw_trace(mix, count, rate_per_s=rate, alone_s=pool.alone_s, seed=seed)
    return figures(_run(pool, trace, "refuse", seed), _run(pool, trace, "accept", seed))


def _run(
    pool: SimulatedPool, trace: Sequence[Planned], when_late: WhenLate, seed: int
) -> list[Ended]:
    hardware = Hardware(pool.cost, noise_cv=_NOISE_CV, encode_s=pool.encode_s)
    spec = PoolSpec(
        pool.name, _MODEL, pool.num_replicas, hardware, pool.max_batch, pool.max_in_flight
    )
    arrivals = [
        Arrival(one.at_s, _MODEL, one.side_px, one.side_px, one.num_steps, slo_s=one.slo_s)
        for one in trace
    ]
    result = SimulatedCell(CellSpec((spec,), seed=seed, when_late=when_late)).run(arrivals)
    return [
        Ended(
            fate.end != "refused",
            fate.arrival.slo_s,
            fate.predicted_s,
            fate.end_s - fate.arrival.arrival_s if fate.end == "finished" else None,
        )
        for fate in result.fates
    ]


def _view(planned: Planned) -> RequestView:
    side = planned.side_px
    blank = RequestView("", _MODEL, side, side, planned.num_steps, True, 0, 0.0, 0.0)
    return replace(blank, deadline_s=1e9)
