"""The policies that a cascade is compared under, and what they are searched over.

Every policy can be searched on seeds of its own (0 to 9), among the candidates here: the one of
best quality with at most 2 % violations, or, if there is none, of fewest violations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ray_cluster.policies.baselines.fixed_cascades import (
    FixedPlanner,
    all_heavy,
    all_light,
    for_the_peak,
)
from ray_cluster.policies.baselines.random_scaling import RandomScalingPlanner
from ray_cluster.policies.baselines.threshold_maximising import ThresholdPlanner
from ray_cluster.policies.fleet import PoolSpec
from ray_cluster.policies.plan import Plan
from ray_cluster.policies.planner import AllocationPlanner
from ray_cluster.simulator.cascade_experiment import (
    CascadeExperiment,
    CascadeRow,
    run_cascade,
    two_pools,
)
from ray_cluster.simulator.control_course import ControlResult
from ray_cluster.simulator.control_experiment import (
    TUNING_SEEDS,
    ControlPolicy,
    ControlRun,
    Settings,
    grid,
    policy_named,
)

MOST_VIOLATIONS = 0.02
_FACTORS = (1.05, 1.15, 1.25, 1.4)
_SMOOTHED = ("smoothing", "demand_factor")

CascadePolicy = ControlPolicy[CascadeExperiment]

POLICIES: tuple[CascadePolicy, ...] = (
    ControlPolicy(
        "allocation",
        lambda fleet, _, s: AllocationPlanner(fleet, demand_quantile=s[0], utilisation=s[1]),
        ("demand_quantile", "utilisation"),
        grid((0.6, 0.75), (0.95, 0.9, 1.0)),
    ),
    ControlPolicy(
        "all-light",
        lambda fleet, e, s: all_light(fleet, e.num_gpus, max_batch=_cap(fleet.pools[0], s[0])),
        ("max_batch",),
        grid((4.0, 8.0, 16.0, 32.0)),
    ),
    ControlPolicy(
        "all-heavy",
        lambda fleet, e, s: all_heavy(fleet, e.num_gpus, max_batch=_cap(fleet.pools[1], s[0])),
        ("max_batch",),
        grid((1.0, 2.0, 4.0)),
    ),
    ControlPolicy(
        "proteus",
        lambda fleet, _, s: RandomScalingPlanner(fleet, s[0], s[1]),
        _SMOOTHED,
        grid((0.5, 0.2, 0.8), _FACTORS),
    ),
    ControlPolicy(
        "static",
        lambda fleet, e, s: for_the_peak(fleet, e.num_gpus, peak_per_s=s[0] * e.high_per_s),
        ("peak_factor",),
        grid((1.05, 1.0, 1.1, 1.15, 1.25, 1.4)),
    ),
    ControlPolicy(
        "static-threshold",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1], fixed_threshold=s[2]),
        (*_SMOOTHED, "threshold"),
        grid((0.5, 0.8), _FACTORS, (0.05, 0.08, 0.1, 0.15, 0.2)),
    ),
    ControlPolicy(
        "diffserve",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1]),
        _SMOOTHED,
        grid((0.5, 0.2, 0.8), _FACTORS),
    ),
    ControlPolicy(
        "aimd",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1], adapts_batches=True),
        _SMOOTHED,
        grid((0.2, 0.5, 0.8), _FACTORS),
    ),
    ControlPolicy(
        "queue-2",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1], wait_by_execution=2.0),
        _SMOOTHED,
        grid((0.5,), (1.05,)),
    ),
    ControlPolicy(
        "queue-1",
        lambda fleet, _, s: ThresholdPlanner(fleet, s[0], s[1], wait_by_execution=1.0),
        _SMOOTHED,
        grid((0.5, 0.8), _FACTORS),
    ),
)


def run_one(
    experiment: CascadeExperiment, policy: CascadePolicy, settings: Settings, seed: int
) -> ControlResult[CascadeRow]:
    """Simulate a policy on a seed, begun with replicas that suit it."""
    planner = policy.build(experiment.fleet(), experiment, settings)
    initial = planner.fixed if isinstance(planner, FixedPlanner) else _initial(experiment)
    return run_cascade(experiment, policy.name, planner, seed, initial)


def run_part(experiment: CascadeExperiment, run: ControlRun) -> ControlResult[CascadeRow]:
    """Simulate a run of an experiment's file."""
    found = run_one(experiment, policy_named(POLICIES, run.policy), run.settings, run.seed)
    return found if experiment.shows(run.policy, run.seed) else replace(found, course=None)


def _cap(pool: PoolSpec, max_batch: float) -> int:
    """A batch that the pool's table has room for."""
    return min(int(max_batch), max(one.batch for one in pool.options))


def _initial(experiment: CascadeExperiment) -> Plan:
    """Replicas for the peak by the published sums, which suit every dynamic policy."""
    num_light = max(1, round(experiment.num_gpus / 8))
    return two_pools(num_light, experiment.num_gpus - num_light, light_batch=16, heavy_batch=4)


def search(
    experiment: CascadeExperiment, policy: CascadePolicy, seeds: Sequence[int] = TUNING_SEEDS
) -> Settings:
    """Return the policy's best settings on some seeds; the first of equally good ones."""

    def rank(settings: Settings) -> tuple[bool, float]:
        rows = [run_one(experiment, policy, settings, seed).row for seed in seeds]
        violations = float(np.mean([row.violations for row in rows]))
        is_late = violations > MOST_VIOLATIONS
        return is_late, violations if is_late else float(np.mean([row.fid for row in rows]))

    return min(policy.candidates, key=rank)
