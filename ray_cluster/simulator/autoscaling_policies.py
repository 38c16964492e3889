"""The policies that a day of autoscaling is compared under, and what they were searched over.

Each is searched on seeds 0 to 9: of the settings with enough requests in time, those of fewest
GPU-hours; if there are none, those with most in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ray_cluster.policies.baselines.ongoing_requests import OngoingRequestsPlanner
from ray_cluster.policies.demand import DemandSmoothing
from ray_cluster.policies.fleet import Fleet
from ray_cluster.policies.planner import AllocationPlanner, Planner
from ray_cluster.simulator.autoscaling_experiment import (
    AutoscalingExperiment,
    AutoscalingRow,
    ClairvoyantPlanner,
    begin_of,
    run_day,
)
from ray_cluster.simulator.cascade_policies import (
    REPORTING_SEEDS,
    TUNING_SEEDS,
    Settings,
    grid,
)
from ray_cluster.simulator.comparison import Comparison

LEAST_ATTAINMENT = 0.995
# batches that keep the deadlines: of 6.8 and 5.5 s
_BATCHES = (("sd15", 8), ("sdxl", 4))

Build = Callable[[Fleet, AutoscalingExperiment, Settings], Planner[Any]]


@dataclass(frozen=True, slots=True)
class AutoscalingPolicy:
    """A policy by its name.

    Attributes:
        candidates: settings to search among; the first are the default ones.
    """

    name: str
    build: Build
    candidates: tuple[Settings, ...]


def _allocation(fleet: Fleet, settings: Settings) -> AllocationPlanner:
    smoothing = DemandSmoothing(level_s=30, slope_s=90, dispersion_s=300, peak_s=120)
    return AllocationPlanner(
        fleet, smoothing=smoothing, utilisation=settings[0], surge_quantile=settings[1]
    )


def _ongoing(fleet: Fleet, experiment: AutoscalingExperiment, s: Settings) -> Planner[Any]:
    return OngoingRequestsPlanner(
        fleet,
        _BATCHES,
        target_ongoing_requests=s[0],
        upscale_delay_s=s[1],
        downscale_delay_s=s[2],
        max_replicas=max(one.num_gpus for one in experiment.workloads),
    )


OURS = AutoscalingPolicy(
    "ours", lambda fleet, _, s: _allocation(fleet, s), grid((0.9, 0.75, 1.0), (0.95, 0.8))
)
ONGOING_REQUESTS = AutoscalingPolicy(
    "ongoing requests (Ray Serve)",
    _ongoing,
    grid((2.0, 1.5, 3.0, 4.0), (30.0, 0.0), (600.0, 300.0, 60.0)),
)
CLAIRVOYANT = AutoscalingPolicy(
    "clairvoyant",
    lambda fleet, e, s: ClairvoyantPlanner(_allocation(fleet, s), e, begin_of(e)),
    OURS.candidates,
)

# found by `search`
TUNED: tuple[tuple[str, Settings], ...] = ((ONGOING_REQUESTS.name, (1.5, 30.0, 60.0)),)


def run_policy(
    experiment: AutoscalingExperiment,
    policy: AutoscalingPolicy,
    settings: Settings,
    seeds: Iterable[int],
) -> list[AutoscalingRow]:
    """Return a row per seed."""
    planner = policy.build(experiment.fleet(), experiment, settings)
    return [run_day(experiment, policy.name, planner, seed) for seed in seeds]


def compare(
    experiment: AutoscalingExperiment,
    seeds: Sequence[int] = REPORTING_SEEDS,
    settings: Sequence[tuple[str, Settings]] = TUNED,
) -> Comparison[AutoscalingRow]:
    """Return rows of every policy on the same seeds; the first candidate where none is given."""
    chosen = dict(settings)
    rows = [
        row
        for policy in (OURS, ONGOING_REQUESTS, CLAIRVOYANT)
        for row in run_policy(
            experiment, policy, chosen.get(policy.name, policy.candidates[0]), seeds
        )
    ]
    return Comparison(tuple(rows))


def search(
    experiment: AutoscalingExperiment,
    policy: AutoscalingPolicy,
    seeds: Sequence[int] = TUNING_SEEDS,
) -> Settings:
    """Return the policy's best settings on some seeds; the first of equally good ones."""

    def rank(settings: Settings) -> tuple[bool, float]:
        rows = run_policy(experiment, policy, settings, seeds)
        attainment = float(np.mean([row.attainment for row in rows]))
        is_low = attainment < LEAST_ATTAINMENT
        return is_low, -attainment if is_low else float(np.mean([row.gpu_hours for row in rows]))

    return min(policy.candidates, key=rank)
