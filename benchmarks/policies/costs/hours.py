"""What an hour of simulation costs: cells of one-GPU replicas, and groups beside each other.

All load is in proportion to the GPUs: 1,024 of them get some 300,000 requests an hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.policies.costs.rounds import OURS
from benchmarks.policies.costs.settings import GROUP_GPUS, CostSettings
from benchmarks.settings import Report
from benchmarks.stopwatch import Stopwatch
from ray_cluster.policies.types import StepCost
from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.cell.cell import CellSpec, PoolSpec, SimulatedCell
from ray_cluster.simulator.groups.experiment import SpCondition, SpExperiment, run_tasks
from ray_cluster.simulator.groups.policies import planner_of
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Kind, Mix, draw_workload

CELL, GROUPS = "one-GPU replicas", f"groups of {GROUP_GPUS}"
AIMS_S = {CELL: 60.0, GROUPS: 600.0}
# GPUs at which they hold
_AIM_AT = 1024
# a request takes 3 s of a replica alone, so that they are busy for a quarter of the time
_RATE_PER_S = 84.0 / 1024
_COST = StepCost(0.04, 0.017)
_SIDES_PX, _STEPS, _SLO_S, _POLL_S = (512, 768, 1024), 50, 15.0, 30.0
_GROUP_RATE_PER_MIN = 5000.0 / 128
_GROUP_SCALE = 1.3


@dataclass(frozen=True, slots=True)
class Hour:
    """One simulation.

    Attributes:
        simulated_s: an hour, unless the settings say otherwise.
        on_time: share of the requests.
    """

    what: str
    gpus: int
    requests: int
    simulated_s: float
    cpu_s: float
    wall_s: float
    on_time: float
    aim_s: float | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the aim is met; None without one."""
        return None if self.aim_s is None else self.cpu_s <= self.aim_s


def measure_hours(settings: CostSettings, report: Report) -> Iterator[Hour]:
    """Simulate cells and groups of every number."""
    # a group's GPU takes about half as long as a cell's
    weights = [float(one) for one in settings.hours]
    weights += [GROUP_GPUS * one / 2 for one in settings.groups]
    for place, count in enumerate((*settings.hours, *settings.groups)):
        is_cell = place < len(settings.hours)
        text = f"{count} {'replicas' if is_cell else GROUPS}"
        report(sum(weights[:place]) / sum(weights), text)
        yield (simulate_cell if is_cell else simulate_groups)(count, settings.hour_s)


def simulate_cell(replicas: int, seconds: float) -> Hour:
    """Simulate a cell with the production dispatcher and policies."""
    kinds = tuple(Kind(1.0, "model", side, side, _STEPS) for side in _SIDES_PX)
    mix = Mix(kinds, lambda _: _SLO_S)
    workload = draw_workload(mix, constant_rate(_RATE_PER_S * replicas, seconds), seed=1)
    pool = PoolSpec("pool", "model", replicas, Hardware(_COST), 12, 16)
    cell = SimulatedCell(CellSpec((pool,), poll_s=_POLL_S))
    with Stopwatch() as watch:
        result = cell.run(workload)
    return Hour(
        CELL,
        replicas,
        len(workload),
        seconds,
        watch.cost.process_s,
        watch.cost.wall_s,
        result.attainment,
        AIMS_S[CELL] if replicas == _AIM_AT else None,
    )


def simulate_groups(count: int, seconds: float) -> Hour:
    """Simulate groups that each decide rounds by our policy, on requests of their own."""
    cell = SpCondition("uniform", _GROUP_RATE_PER_MIN, _GROUP_SCALE)
    experiment = SpExperiment(
        kind="sequence-parallel",
        name="hour",
        what="An hour.",
        profile="flux-h100-a",
        rates_per_min=(cell.rate_per_min,),
        scales=(cell.scale,),
        policies=(OURS[0],),
        num_arrivals=max(1, round(_GROUP_RATE_PER_MIN * seconds / 60)),
    )
    workloads = [experiment.tasks(cell, seed) for seed in range(1000, 1000 + count)]
    planner = planner_of(OURS[0], experiment.menus())
    with Stopwatch() as watch:
        runs = [
            run_tasks(tasks, planner, num_gpus=GROUP_GPUS, switch_s=experiment.switch_s)
            for tasks in workloads
        ]
    ends = [outcome.is_on_time for run in runs for outcome in run.outcomes]
    gpus = GROUP_GPUS * count
    return Hour(
        GROUPS,
        gpus,
        len(ends),
        seconds,
        watch.cost.process_s,
        watch.cost.wall_s,
        sum(ends) / len(ends),
        AIMS_S[GROUPS] if gpus == _AIM_AT else None,
    )
