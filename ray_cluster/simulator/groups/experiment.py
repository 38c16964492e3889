"""Experiment files of the kind ``sequence-parallel``: requests on one group of GPUs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, field_validator

from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, Planner
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.experiment import Experiment, load_choices
from ray_cluster.simulator.groups.bound import bound_on_time
from ray_cluster.simulator.groups.group import GroupOutcome, GroupTask, SimulatedGroup, Stretch
from ray_cluster.simulator.groups.policies import planner_of
from ray_cluster.simulator.groups.workload import (
    FLUX_CLASSES,
    MixName,
    draw_count,
    menus_of,
    size_mix,
    tasks_of,
)
from ray_cluster.simulator.reports import Bar
from ray_cluster.simulator.results import Row

BOUND = "bound"
FAMILIES = ("best_static", "best_fixed", "best_knapsack")
SHOWN_S = 120.0
# of a seed, the stream that noise and planner errors are drawn from
_NOISE_STREAM = 17


@dataclass(frozen=True, slots=True, order=True)
class SpCondition:
    """One load, and one scale of the deadlines."""

    mix: MixName
    rate_per_min: float
    scale: float

    @property
    def load_words(self) -> str:
        return f"{self.mix}, {self.rate_per_min:g} per minute"


@dataclass(frozen=True, slots=True)
class TunedPolicy:
    """The best of a family of policies in one cell.

    Attributes:
        family: its name in experiments.
        policy: the name of the best.
        attainment: percentage on the tuning seeds.
        num_tried: candidates.
    """

    profile: str
    family: str
    cell: SpCondition
    policy: str
    attainment: float
    num_tried: int


class SpExperiment(Experiment):
    """What is simulated."""

    kind: Literal["sequence-parallel"]
    profile: str = Field(description="a latency profile, by its name or path")
    mixes: tuple[MixName, ...] = Field(("uniform", "skewed"), min_length=1)
    rates_per_min: tuple[Annotated[float, Field(gt=0, le=1e6)], ...] = Field(min_length=1)
    scales: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = Field(
        min_length=1, description="of the deadlines"
    )
    choices: Path | None = Field(None, description="tuned policies by cell, beside the file")
    num_arrivals: int = Field(300, ge=1, le=100_000)
    num_gpus: int = Field(8, ge=1, le=64)
    switch_s: float = Field(0.01, ge=0, le=60)
    step_noise: float = Field(0.0, ge=0, le=1, description="CV of equal steps")
    time_error: float = Field(0.0, ge=0, le=1)
    # above 2 a seed now and then has too few arrivals
    cv: float = Field(1.0, ge=0, le=2, description="of the gaps between arrivals")

    @field_validator("policies")
    @classmethod
    def _check_first(cls, policies: tuple[str, ...]) -> tuple[str, ...]:
        if policies[0] == BOUND:
            raise ValueError(
                f"the others are compared with the first policy, and {BOUND!r} is none: put it "
                "behind one"
            )
        return policies

    @property
    def cells(self) -> list[SpCondition]:
        """All combinations of mix, rate and scale."""
        return [SpCondition(*one) for one in product(self.mixes, self.rates_per_min, self.scales)]

    @property
    def middle_scale(self) -> float:
        """The scale of figures that are shown for one scale only."""
        return sorted(self.scales)[len(self.scales) // 2]

    def menus(self) -> dict[str, DegreeMenu]:
        """Return what steps take at each degree, by class.

        Raises:
            ConfigError: there is no such profile.
            ValueError: it lacks images of some size.
        """
        profile = load_profile(self.profile)
        sides_px = {
            row.key.width_px for row in profile.of("image") if row.key.sp_degree <= self.num_gpus
        }
        lacking = [one.side_px for one in FLUX_CLASSES if one.side_px not in sides_px]
        if lacking:
            raise ValueError(
                f"profile: given {self.profile!r}, which has no whole images of "
                f"{', '.join(map(str, lacking))} px on up to {self.num_gpus} GPUs; allowed: "
                "profiles that have them, such as flux-h100-a"
            )
        return menus_of(profile, num_gpus=self.num_gpus)

    def tasks(self, cell: SpCondition, seed: int) -> list[GroupTask]:
        arrivals = draw_count(
            size_mix(cell.mix, load_profile(self.profile)),
            cell.rate_per_min / 60,
            self.num_arrivals,
            seed=seed,
            cv=self.cv,
        )
        return tasks_of(
            arrivals,
            self.menus(),
            scale=cell.scale,
            step_noise=self.step_noise,
            time_error=self.time_error,
            rng=np.random.default_rng([seed, _NOISE_STREAM]),
        )


@dataclass(frozen=True, slots=True)
class SpUnit:
    """One workload of an experiment, and the policies to run on it.

    Attributes:
        policies: the policy that each name in the experiment stands for.
        records: whether to keep what the first policy ran where and when.
    """

    experiment: SpExperiment
    cell: SpCondition
    seed: int
    policies: Mapping[str, str]
    records: bool = False


@dataclass(frozen=True, slots=True)
class SpRow(Row):
    """One policy on one workload.

    Its figures are `attainment` (share of the requests on time), and per request `gpu_s`
    (GPU-seconds held) and `num_switches` (changes of degree and resumptions).

    Attributes:
        bars: which GPU ran which size in the first two minutes, if that was recorded.
    """

    bars: tuple[Bar, ...] = ()


def units_of(experiment: SpExperiment, folder: Path) -> list[SpUnit]:
    """Return all workloads, if all of their policies can be run; choices are in the folder.

    Raises:
        ConfigError: the profile or the file of choices can't be read.
        ValueError: the profile lacks images of some size, there is no such policy, or nothing was
            chosen for a family in some cell.
    """
    choices = {}
    if experiment.choices is not None:
        read = load_choices(folder / experiment.choices, TunedPolicy)
        choices = {
            (one.family, one.cell): one.policy for one in read if one.profile == experiment.profile
        }
    menus, units = experiment.menus(), []
    shown = SpCondition(experiment.mixes[0], experiment.rates_per_min[0], experiment.middle_scale)
    for cell in experiment.cells:
        policies = {name: choices.get((name, cell), name) for name in experiment.policies}
        for name, stands_for in policies.items():
            if stands_for in FAMILIES:
                raise ValueError(
                    f"policies: given {name!r}, of which nothing was chosen for "
                    f"{experiment.profile}, {cell.load_words} at a scale of {cell.scale:g}; "
                    "allowed: the cells of the file that `choices` names"
                )
            try:
                if stands_for != BOUND:
                    planner_of(stands_for, menus)
            except ValueError as error:
                raise ValueError(f"policies: {error}") from None
        units += [
            SpUnit(
                experiment, cell, seed, policies, cell == shown and seed == experiment.first_seed
            )
            for seed in experiment.seeds
        ]
    return units


def run_unit(unit: SpUnit) -> list[SpRow]:
    """Run every policy on one workload."""
    experiment, rows = unit.experiment, list[SpRow]()
    menus, tasks = experiment.menus(), experiment.tasks(unit.cell, unit.seed)
    for label, name in unit.policies.items():
        if name == BOUND:
            share = bound_on_time(tasks, experiment.num_gpus).num_on_time / len(tasks)
            figures = {"attainment": share, "gpu_s": 0.0, "num_switches": 0.0}
            rows.append(SpRow(label, unit.seed, figures, unit.cell))
            continue
        run = run_tasks(
            tasks,
            planner_of(name, menus),
            num_gpus=experiment.num_gpus,
            switch_s=experiment.switch_s,
            records=unit.records and not rows,
        )
        rows.append(_row(label, unit, run))
    return rows


@dataclass(frozen=True, slots=True)
class SpRun:
    """Everything that happened to a workload in a group."""

    outcomes: tuple[GroupOutcome, ...]
    stretches: tuple[Stretch, ...]


def run_tasks(
    tasks: Sequence[GroupTask],
    planner: Planner,
    *,
    num_gpus: int,
    switch_s: float,
    records: bool = False,
) -> SpRun:
    """Run requests through one group to their ends; `records` keeps what ran where and when."""
    events, outcomes = EventQueue(), list[GroupOutcome]()
    group = SimulatedGroup(
        *(events, planner),
        num_gpus=num_gpus,
        switch_s=switch_s,
        on_end=outcomes.append,
        records=records,
    )
    for task in tasks:
        events.at(task.arrival_s, partial(group.add, task))
    events.run()
    return SpRun(tuple(outcomes), tuple(group.stretches))


def _row(label: str, unit: SpUnit, run: SpRun) -> SpRow:
    count, ends = len(run.outcomes), dict[str, list[bool]]()
    for outcome in run.outcomes:
        ends.setdefault(outcome.task.menu.slo_class, []).append(outcome.is_on_time)
    figures = {
        "attainment": sum(one.is_on_time for one in run.outcomes) / count,
        "gpu_s": math.fsum(one.gpu_s for one in run.outcomes) / count,
        "num_switches": sum(one.num_switches for one in run.outcomes) / count,
    }
    by_class = {name: sum(ends[name]) / len(ends[name]) for name in sorted(ends, key=int)}
    class_of = {one.task.request_id: one.task.menu.slo_class for one in run.outcomes}
    bars = tuple(
        Bar(gpu, one.begin_s, min(one.end_s, SHOWN_S), f"{class_of[one.request_id]} px")
        for one in run.stretches
        if one.begin_s < SHOWN_S
        for gpu in one.gpus
    )
    return SpRow(label, unit.seed, figures, unit.cell, by_class, bars)
