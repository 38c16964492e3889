"""Chooses the best of many baselines for every cell, on seeds of their own.

By halving: all of them on the first seed, the better ones on more, the best on all. What was chosen
stands in a file, so that a report's baselines are fixed before it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ray_cluster.simulator import choice_files
from ray_cluster.simulator.sp_experiment import (
    Choices,
    SpCondition,
    SpExperiment,
    Unit,
    run_unit,
    workload_of,
)
from ray_cluster.simulator.sp_policies import fixed_names, knapsack_names, static_names

# how many candidates go on to how many seeds
_STAGES = ((None, 1), (32, 3), (8, 10))
BEST_STATIC, BEST_FIXED, BEST_KNAPSACK = "best_static", "best_fixed", "best_knapsack"
FAMILIES = (BEST_STATIC, BEST_FIXED, BEST_KNAPSACK)


@dataclass(frozen=True, slots=True)
class TunedPolicy:
    """The best of a family in one cell.

    Attributes:
        family: what it is called in experiments.
        policy: its name.
        attainment: percentage on the tuning seeds.
        num_tried: candidates.
    """

    profile: str
    family: str
    cell: SpCondition
    policy: str
    attainment: float
    num_tried: int


def candidates_of(experiment: SpExperiment, cell: SpCondition, family: str) -> list[str]:
    """Return the policies of a family that a cell may choose from."""
    menus, tasks = workload_of(experiment, cell, experiment.seeds[0])
    if family == BEST_KNAPSACK:
        return knapsack_names()
    if family == BEST_FIXED:
        return fixed_names(menus)
    step_budget_s = {
        task.menu.slo_class: (task.deadline_s - task.arrival_s - task.menu.tail_s) / task.num_steps
        for task in tasks
    }
    return static_names(menus, step_budget_s)


def choose(experiment: SpExperiment, cell: SpCondition, family: str) -> TunedPolicy:
    """Return the best of a family in a cell, on the experiment's seeds."""
    names = tried = candidates_of(experiment, cell, family)
    means: dict[str, float] = {}
    for most, num_seeds in _STAGES:
        if most is not None:
            names = sorted(names, key=lambda name: -means[name])[:most]
        means = _means(experiment, cell, names, experiment.seeds[:num_seeds])
    best = max(names, key=lambda name: means[name])
    points = round(100 * means[best], 3)
    return TunedPolicy(experiment.profile, family, cell, best, points, len(tried))


def _means(
    experiment: SpExperiment, cell: SpCondition, names: Sequence[str], seeds: Sequence[int]
) -> dict[str, float]:
    policies = tuple((name, name) for name in names)
    rows = [row for seed in seeds for row in run_unit(Unit(experiment, cell, seed, policies))]
    return {
        name: float(np.mean([row.attainment for row in rows if row.policy == name]))
        for name in names
    }


def load_choices(path: Path, profile: str) -> Choices:
    """Return the choices of a file for a profile.

    Raises:
        ConfigError: it can't be read, or holds something else.
    """
    read = choice_files.load_choices(
        path, TunedPolicy, command="python -m benchmarks.policies.sp_tune"
    )
    return {(one.family, one.cell): one.policy for one in read if one.profile == profile}
