"""The beginning of one simulation, GPU by GPU, for people to look at."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ray_cluster.simulator.groups import Stretch
from ray_cluster.simulator.reports import Bar, Timeline
from ray_cluster.simulator.sp_experiment import SpExperiment, Unit, run_tasks, workload_of
from ray_cluster.simulator.sp_policies import planner_of

SHOWN_S = 120.0


@dataclass(frozen=True, slots=True)
class Excerpt:
    """What the first policy of a unit did at first.

    Attributes:
        stretches: that began in the time that is shown.
        class_by_request: of the requests that came in it.
    """

    unit: Unit
    stretches: tuple[Stretch, ...]
    class_by_request: dict[int, str]


def shown_unit(experiment: SpExperiment, units: list[Unit]) -> Unit:
    """Return the unit that is shown: of the first load and seed, at the middle scale."""
    scale = middle_scale(experiment)
    return next(unit for unit in units if unit.cell.scale == scale)


def middle_scale(experiment: SpExperiment) -> float:
    """Return the scale at which figures are shown that do not go over scales."""
    return sorted(experiment.scales)[len(experiment.scales) // 2]


def excerpt_of(unit: Unit) -> Excerpt:
    """Simulate the beginning of a unit's workload under its first policy."""
    experiment = unit.experiment
    menus, tasks = workload_of(experiment, unit.cell, unit.seed)
    # what comes later changes nothing before it
    early = [task for task in tasks if task.arrival_s < SHOWN_S]
    run = run_tasks(
        early,
        planner_of(unit.policies[0][1], menus),
        num_gpus=experiment.num_gpus,
        switch_s=experiment.switch_s,
        records=True,
    )
    return Excerpt(
        unit,
        tuple(
            replace(one, end_s=min(one.end_s, SHOWN_S))
            for one in run.stretches
            if one.begin_s < SHOWN_S
        ),
        {task.request_id: task.menu.slo_class for task in early},
    )


def timeline_of(excerpt: Excerpt) -> Timeline:
    """Return an excerpt as a drawing: a row for each GPU, coloured by class."""
    unit, cell = excerpt.unit, excerpt.unit.cell
    bars = [
        Bar(gpu, one.begin_s, one.end_s, _label(excerpt.class_by_request[one.request_id]))
        for one in excerpt.stretches
        for gpu in one.gpus
    ]
    return Timeline(
        "timeline",
        f"{unit.policies[0][0]}: who holds which GPU (simulated); {cell.mix}, "
        f"{cell.rate_per_min:g} per minute, scale {cell.scale:g}, seed {unit.seed}",
        [f"GPU {number}" for number in range(unit.experiment.num_gpus)],
        [_label(str(one.side_px)) for one in unit.experiment.classes],
        bars,
    )


def _label(name: str) -> str:
    return f"{name} px"
