"""The policies that a day of autoscaling is compared under, and what they are searched over.

Each can be searched on seeds 0 to 9: of the settings with enough requests in time, those of fewest
GPU-hours; if there are none, those with most in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ray_cluster.policies.baselines.ongoing_requests import OngoingRequestsPlanner
from ray_cluster.policies.demand import DemandSmoothing
from ray_cluster.policies.fleet import Fleet
from ray_cluster.policies.planner import AllocationPlanner, Planner
from ray_cluster.simulator.autoscaling_experiment import (
    AutoscalingExperiment,
    AutoscalingRow,
    begin_of,
    run_day,
)
from ray_cluster.simulator.clairvoyant import ClairvoyantPlanner
from ray_cluster.simulator.control_course import ControlResult
from ray_cluster.simulator.control_experiment import (
    TUNING_SEEDS,
    ControlPolicy,
    ControlRun,
    Settings,
    grid,
    policy_named,
)

LEAST_ATTAINMENT = 0.995

AutoscalingPolicy = ControlPolicy[AutoscalingExperiment]


def _allocation(fleet: Fleet, settings: Settings) -> AllocationPlanner:
    smoothing = DemandSmoothing(level_s=30, slope_s=90, dispersion_s=300, peak_s=120)
    return AllocationPlanner(
        fleet, smoothing=smoothing, utilisation=settings[0], surge_quantile=settings[1]
    )


def _ongoing(fleet: Fleet, experiment: AutoscalingExperiment, s: Settings) -> Planner[Any]:
    return OngoingRequestsPlanner(
        fleet,
        tuple((one.service, one.max_batch) for one in experiment.workloads),
        target_ongoing_requests=s[0],
        upscale_delay_s=s[1],
        downscale_delay_s=s[2],
        max_replicas=max(one.num_gpus for one in experiment.workloads),
    )


_ALLOCATIONS = grid((0.9, 0.75, 1.0), (0.95, 0.8))
_ALLOCATION_KNOBS = ("utilisation", "surge_quantile")

POLICIES: tuple[AutoscalingPolicy, ...] = (
    ControlPolicy(
        "allocation", lambda fleet, _, s: _allocation(fleet, s), _ALLOCATION_KNOBS, _ALLOCATIONS
    ),
    ControlPolicy(
        "ongoing-requests",
        _ongoing,
        ("target_ongoing_requests", "upscale_delay_s", "downscale_delay_s"),
        grid((2.0, 1.5, 3.0, 4.0), (30.0, 0.0), (600.0, 300.0, 60.0)),
    ),
    ControlPolicy(
        "clairvoyant",
        lambda fleet, e, s: ClairvoyantPlanner(_allocation(fleet, s), e, begin_of(e)),
        _ALLOCATION_KNOBS,
        _ALLOCATIONS,
    ),
)


def run_one(
    experiment: AutoscalingExperiment, policy: AutoscalingPolicy, settings: Settings, seed: int
) -> ControlResult[AutoscalingRow]:
    """Simulate a policy on a seed."""
    planner = policy.build(experiment.fleet(), experiment, settings)
    return run_day(experiment, policy.name, planner, seed)


def run_part(experiment: AutoscalingExperiment, run: ControlRun) -> ControlResult[AutoscalingRow]:
    """Simulate a run of an experiment's file."""
    found = run_one(experiment, policy_named(POLICIES, run.policy), run.settings, run.seed)
    return found if experiment.shows(run.policy, run.seed) else replace(found, course=None)


def search(
    experiment: AutoscalingExperiment,
    policy: AutoscalingPolicy,
    seeds: Sequence[int] = TUNING_SEEDS,
) -> Settings:
    """Return the policy's best settings on some seeds; the first of equally good ones."""

    def rank(settings: Settings) -> tuple[bool, float]:
        rows = [run_one(experiment, policy, settings, seed).row for seed in seeds]
        attainment = float(np.mean([row.attainment for row in rows]))
        is_low = attainment < LEAST_ATTAINMENT
        return is_low, -attainment if is_low else float(np.mean([row.gpu_hours for row in rows]))

    return min(policy.candidates, key=rank)
