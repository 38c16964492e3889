"""The policies that a cascade is compared under, and the settings that they were searched over.

Every policy is searched on seeds of its own (0 to 9), among the candidates here: the one of best
quality with at most 2 % violations, or, if there is none, of fewest violations. `TUNED` holds what
was found; it is searched again with :func:`search`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_cluster.policies.baselines.fixed_cascades import (
    FixedPlanner,
    all_heavy,
    all_light,
    for_the_peak,
)
from ray_cluster.policies.baselines.random_scaling import RandomScalingPlanner
from ray_cluster.policies.baselines.threshold_maximising import ThresholdPlanner
from ray_cluster.policies.fleet import Fleet
from ray_cluster.policies.plan import Plan
from ray_cluster.policies.planner import AllocationPlanner, Planner
from ray_cluster.simulator.cascade_experiment import (
    CascadeExperiment,
    CascadeRow,
    run_cascade,
    two_pools,
)
from ray_cluster.simulator.comparison import Comparison

TUNING_SEEDS = tuple(range(10))
REPORTING_SEEDS = tuple(range(1000, 1030))
MOST_VIOLATIONS = 0.02
_LIGHT_BATCHES = (4.0, 8.0, 16.0, 32.0)
_HEAVY_BATCHES = (1.0, 2.0, 4.0)
_FACTORS = (1.05, 1.15, 1.25, 1.4)
_SMOOTHINGS = (0.2, 0.5, 0.8)

Settings = tuple[float, ...]
Build = Callable[[Fleet, CascadeExperiment, Settings], Planner[Any]]


@dataclass(frozen=True, slots=True)
class CascadePolicy:
    """A policy by its name.

    Attributes:
        build: from settings.
        candidates: settings to search among; the published ones are the first.
    """

    name: str
    build: Build
    candidates: tuple[Settings, ...]


def grid(*axes: Iterable[float]) -> tuple[Settings, ...]:
    """Return all combinations of values, the last axis first to change."""
    return tuple(itertools.product(*axes))


OURS = CascadePolicy(
    "ours",
    lambda fleet, _, s: AllocationPlanner(fleet, demand_quantile=s[0], utilisation=s[1]),
    grid((0.6, 0.75), (0.95, 0.9, 1.0)),
)
BASELINES = (
    CascadePolicy(
        "all light",
        lambda fleet, e, s: all_light(fleet, e.num_gpus, max_batch=int(s[0])),
        grid(_LIGHT_BATCHES),
    ),
    CascadePolicy(
        "all heavy",
        lambda fleet, e, s: all_heavy(fleet, e.num_gpus, max_batch=int(s[0])),
        grid(_HEAVY_BATCHES),
    ),
    CascadePolicy(
        "random routing (Proteus)",
        lambda fleet, _, s: RandomScalingPlanner(fleet, s[0], s[1]),
        grid((0.5, 0.2, 0.8), _FACTORS),
    ),
    CascadePolicy(
        "static for the peak",
        lambda fleet, e, s: for_the_peak(fleet, e.num_gpus, peak_per_s=s[0] * e.high_per_s),
        grid((1.05, 1.0, 1.1, 1.15, 1.25, 1.4)),
    ),
    CascadePolicy(
        "static threshold",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1], fixed_threshold=s[2]),
        grid((0.5, 0.8), _FACTORS, (0.05, 0.08, 0.1, 0.15, 0.2)),
    ),
    CascadePolicy(
        "highest threshold (DiffServe)",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1]),
        grid((0.5, 0.2, 0.8), _FACTORS),
    ),
    CascadePolicy(
        "AIMD batches",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1], adapts_batches=True),
        grid(_SMOOTHINGS, _FACTORS),
    ),
    CascadePolicy(
        "queue of 2 executions",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1], wait_by_execution=2.0),
        grid((0.5,), (1.05,)),
    ),
    CascadePolicy(
        "queue of 1 execution",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1], wait_by_execution=1.0),
        grid((0.5, 0.8), _FACTORS),
    ),
)

# found by `search` with replicas that change their model at once, as published (load_s = 0)
TUNED: tuple[tuple[str, Settings], ...] = (
    ("all light", (4.0,)),
    ("all heavy", (4.0,)),
    ("random routing (Proteus)", (0.8, 1.05)),
    ("static for the peak", (1.0,)),
    ("static threshold", (0.5, 1.4, 0.1)),
    ("highest threshold (DiffServe)", (0.2, 1.4)),
    ("AIMD batches", (0.5, 1.4)),
    ("queue of 2 executions", (0.5, 1.05)),
    ("queue of 1 execution", (0.5, 1.25)),
)


def run_policy(
    experiment: CascadeExperiment,
    policy: CascadePolicy,
    settings: Settings,
    seeds: Iterable[int],
) -> list[CascadeRow]:
    """Return a row per seed, each begun with replicas that suit the policy."""
    fleet = experiment.fleet()
    planner = policy.build(fleet, experiment, settings)
    initial = planner.fixed if isinstance(planner, FixedPlanner) else _initial(experiment)
    return [run_cascade(experiment, policy.name, planner, seed, initial) for seed in seeds]


def _initial(experiment: CascadeExperiment) -> Plan:
    """Replicas for the peak by the published sums, which suit every dynamic policy."""
    num_light = max(1, round(experiment.num_gpus / 8))
    return two_pools(num_light, experiment.num_gpus - num_light, light_batch=16, heavy_batch=4)


def compare(
    experiment: CascadeExperiment,
    seeds: Sequence[int] = REPORTING_SEEDS,
    settings: Sequence[tuple[str, Settings]] = TUNED,
) -> Comparison[CascadeRow]:
    """Return rows of ours and of every policy that settings are given for, on the same seeds.

    Ours runs with its first candidate unless settings are given for it.
    """
    chosen = {OURS.name: OURS.candidates[0], **dict(settings)}
    every = (OURS, *BASELINES)
    rows = [
        row
        for policy in every
        if policy.name in chosen
        for row in run_policy(experiment, policy, chosen[policy.name], seeds)
    ]
    return Comparison(tuple(rows))


def search(
    experiment: CascadeExperiment, policy: CascadePolicy, seeds: Sequence[int] = TUNING_SEEDS
) -> Settings:
    """Return the policy's best settings on some seeds; the first of equally good ones."""

    def rank(settings: Settings) -> tuple[bool, float]:
        rows = run_policy(experiment, policy, settings, seeds)
        violations = float(np.mean([row.violations for row in rows]))
        is_late = violations > MOST_VIOLATIONS
        return is_late, violations if is_late else float(np.mean([row.fid for row in rows]))

    return min(policy.candidates, key=rank)
