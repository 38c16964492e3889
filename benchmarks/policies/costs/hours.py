"""What an hour of simulation costs: cells of one-GPU replicas, and fleets of groups.

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
from ray_cluster.simulator.cell import CellSpec, PoolSpec, SimulatedCell
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.sp_experiment import SpCondition as SpCell
from ray_cluster.simulator.sp_experiment import SpExperiment, workload_of
from ray_cluster.simulator.sp_fleet import run_fleet
from ray_cluster.simulator.sp_policies import planner_of
from ray_cluster.simulator.workload import Kind, Mix, draw_workload

CELL, FLEET = "one-GPU replicas", f"groups of {GROUP_GPUS}"
AIMS_S = {CELL: 60.0, FLEET: 600.0}
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
    """One simulated stretch of time, which is an hour unless the settings say otherwise.

    Attributes:
        simulated_s: how long it was.
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
    """Simulate cells and fleets of every size."""
    # a group's GPU takes about half as long as a cell's
    weights = [float(one) for one in settings.hours]
    weights += [GROUP_GPUS * one / 2 for one in settings.fleets]
    num_cells = len(settings.hours)
    for place, count in enumerate((*settings.hours, *settings.fleets)):
        is_cell = place < num_cells
        text = f"{count} {'replicas' if is_cell else FLEET}"
        report(sum(weights[:place]) / sum(weights), text)
        if is_cell:
            yield simulate_cell(count, settings.hour_s)
        else:
            yield simulate_fleet(count, settings.hour_s)


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


def simulate_fleet(groups: int, seconds: float) -> Hour:
    """Simulate groups that each decide rounds by our policy."""
    rate_per_min = _GROUP_RATE_PER_MIN * groups
    experiment = SpExperiment(num_arrivals=max(1, round(rate_per_min * seconds / 60)))
    menus, tasks = workload_of(experiment, SpCell("uniform", rate_per_min, _GROUP_SCALE), seed=1000)
    with Stopwatch() as watch:
        fleet = run_fleet(
            tasks,
            planner_of(OURS[0], menus),
            num_groups=groups,
            num_gpus=GROUP_GPUS,
            switch_s=experiment.switch_s,
        )
    gpus = GROUP_GPUS * groups
    return Hour(
        FLEET,
        gpus,
        fleet.num_requests,
        seconds,
        watch.cost.process_s,
        watch.cost.wall_s,
        fleet.num_on_time / fleet.num_requests,
        AIMS_S[FLEET] if gpus == _AIM_AT else None,
    )
