"""Experiments on one group of GPUs: the same requests under several policies.

Every number that comes from here is simulated, and as good as its latency profile is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from ray_cluster.models.profiles import load_profile
from ray_cluster.policies.sp_types import DegreeMenu, Planner
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.groups import GroupOutcome, GroupTask, SimulatedGroup, Stretch
from ray_cluster.simulator.sp_bound import bound_on_time
from ray_cluster.simulator.sp_policies import planner_of
from ray_cluster.simulator.sp_workload import (
    FLUX_CLASSES,
    MixName,
    SizeClass,
    draw_count,
    menus_of,
    size_mix,
    tasks_of,
)

BOUND = "bound"
# of a seed, the stream that noise and planner errors are drawn from
_NOISE_STREAM = 17
TUNING_SEEDS = tuple(range(10))
REPORTING_SEEDS = tuple(range(1000, 1030))


@dataclass(frozen=True, slots=True, order=True)
class SpCondition:
    """One load, and one scale of the deadlines."""

    mix: MixName
    rate_per_min: float
    scale: float


@dataclass(frozen=True, slots=True)
class SpExperiment:
    """What is simulated.

    Attributes:
        profile: a latency profile, by its name or path.
        policies: names as in :mod:`ray_cluster.simulator.sp_policies`, or ``bound``; what is in no
            such table is looked up among the choices that a run is given.
        num_arrivals: requests of each run.
        switch_s: seconds that a change of degree costs.
        step_noise: coefficient of variation of a step's seconds.
        time_error: standard deviation of the factor by which a planner sees a class's seconds.
        cv: coefficient of variation of the gaps between arrivals.
    """

    profile: str = "flux-h100-a"
    mixes: tuple[MixName, ...] = ("uniform", "skewed")
    rates_per_min: tuple[float, ...] = (12.0, 18.0)
    scales: tuple[float, ...] = (1.0, 1.1, 1.2, 1.3, 1.5)
    policies: tuple[str, ...] = ("rounds/most", "widest")
    seeds: tuple[int, ...] = REPORTING_SEEDS
    num_arrivals: int = 300
    num_gpus: int = 8
    switch_s: float = 0.01
    step_noise: float = 0.0
    time_error: float = 0.0
    cv: float = 1.0
    classes: tuple[SizeClass, ...] = FLUX_CLASSES

    def cells(self) -> list[SpCondition]:
        """Return all combinations of mix, rate and scale."""
        return [SpCondition(*one) for one in product(self.mixes, self.rates_per_min, self.scales)]


Choices = Mapping[tuple[str, SpCondition], str]
"""By a name of an experiment's and a cell: the policy that stands for it there."""


@dataclass(frozen=True, slots=True)
class SpRow:
    """One policy on one workload.

    Attributes:
        policy: its name in the experiment.
        attainment: share of the requests that were on time.
        attainment_by_class: the same of each class, by its name; none for a bound.
        gpu_s: GPU-seconds that requests held, per request.
        num_switches: changes of degree and resumptions, per request.
    """

    policy: str
    cell: SpCondition
    seed: int
    attainment: float
    attainment_by_class: tuple[tuple[str, float], ...] = ()
    gpu_s: float = 0.0
    num_switches: float = 0.0


@dataclass(frozen=True, slots=True)
class SpRun:
    """Everything that happened to a workload in a group."""

    outcomes: tuple[GroupOutcome, ...]
    stretches: tuple[Stretch, ...]
    num_decisions: int


@dataclass(frozen=True, slots=True)
class Unit:
    """One workload of an experiment, and the policies to run on it: names, and what they stand for.

    Plain data, so that another process can do it.
    """

    experiment: SpExperiment
    cell: SpCondition
    seed: int
    policies: tuple[tuple[str, str], ...]


def units_of(experiment: SpExperiment, choices: Choices) -> list[Unit]:
    """Return all workloads, with the policies that were chosen for their cells by tuning."""
    return [
        Unit(experiment, cell, seed, tuple(_resolved(experiment, cell, choices)))
        for cell in experiment.cells()
        for seed in experiment.seeds
    ]


def run_unit(unit: Unit) -> list[SpRow]:
    """Run every policy on one workload."""
    experiment = unit.experiment
    menus, tasks = workload_of(experiment, unit.cell, unit.seed)
    rows = []
    for label, name in unit.policies:
        if name == BOUND:
            bound = bound_on_time(tasks, experiment.num_gpus)
            share = bound.num_on_time / len(tasks)
            rows.append(SpRow(label, unit.cell, unit.seed, share))
        else:
            run = run_tasks(
                tasks,
                planner_of(name, menus),
                num_gpus=experiment.num_gpus,
                switch_s=experiment.switch_s,
            )
            rows.append(_row(label, unit, run.outcomes))
    return rows


def workload_of(
    experiment: SpExperiment, cell: SpCondition, seed: int
) -> tuple[dict[str, DegreeMenu], list[GroupTask]]:
    """Return the menus by class and the requests of one seed."""
    profile = load_profile(experiment.profile)
    menus = menus_of(profile, experiment.classes, num_gpus=experiment.num_gpus)
    arrivals = draw_count(
        size_mix(cell.mix, profile, experiment.classes),
        cell.rate_per_min / 60,
        experiment.num_arrivals,
        seed=seed,
        cv=experiment.cv,
    )
    tasks = tasks_of(
        arrivals,
        menus,
        scale=cell.scale,
        step_noise=experiment.step_noise,
        time_error=experiment.time_error,
        rng=np.random.default_rng([seed, _NOISE_STREAM]),
    )
    return menus, tasks


def run_tasks(
    tasks: Sequence[GroupTask],
    planner: Planner,
    *,
    num_gpus: int,
    switch_s: float,
    steps_at_once: bool = True,
    records: bool = False,
) -> SpRun:
    """Run requests through one group to their ends.

    Args:
        tasks: what comes, and when.
        planner: decides.
        num_gpus: of the group.
        switch_s: seconds that a change of degree costs.
        steps_at_once: whether unchanged steps pass in one event.
        records: whether to keep what ran where and when.
    """
    events = EventQueue()
    outcomes: list[GroupOutcome] = []
    group = SimulatedGroup(
        events,
        planner,
        num_gpus=num_gpus,
        switch_s=switch_s,
        on_end=outcomes.append,
        steps_at_once=steps_at_once,
        records=records,
    )
    for task in tasks:
        events.at(task.arrival_s, partial(group.add, task))
    events.run()
    return SpRun(tuple(outcomes), tuple(group.stretches or ()), group.num_decisions)


def _resolved(
    experiment: SpExperiment, cell: SpCondition, choices: Choices
) -> Iterator[tuple[str, str]]:
    for label in experiment.policies:
        yield label, choices.get((label, cell), label)


def _row(label: str, unit: Unit, outcomes: Sequence[GroupOutcome]) -> SpRow:
    count = len(outcomes)
    by_class = {
        str(one.side_px): [
            outcome.is_on_time
            for outcome in outcomes
            if outcome.task.menu.slo_class == str(one.side_px)
        ]
        for one in unit.experiment.classes
    }
    return SpRow(
        label,
        unit.cell,
        unit.seed,
        sum(one.is_on_time for one in outcomes) / count,
        tuple((name, sum(ends) / len(ends)) for name, ends in by_class.items() if ends),
        math.fsum(one.gpu_s for one in outcomes) / count,
        sum(one.num_switches for one in outcomes) / count,
    )
