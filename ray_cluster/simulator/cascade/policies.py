"""Policies of experiments of the kind ``cascade``, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ray_cluster.policies.baselines.fixed_cascades import (
    FixedPlanner,
    all_heavy,
    all_light,
    for_the_peak,
)
from ray_cluster.policies.baselines.random_scaling import RandomScalingPlanner
from ray_cluster.policies.baselines.threshold_maximising import ThresholdPlanner
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec
from ray_cluster.policies.planning.planner import AllocationPlanner
from ray_cluster.simulator.control.experiment import ControlPolicy

_SMOOTHED = {"smoothing": 0.5, "demand_factor": 1.05}


class Asked(Protocol):
    """What policies know of an experiment: GPUs of all models, and the highest rate of requests."""

    @property
    def num_gpus(self) -> int: ...
    @property
    def peak_per_s(self) -> float: ...


def _cap(pool: PoolSpec, max_batch: float) -> int:
    """A batch that is in the pool's table."""
    return min(int(max_batch), max(one.batch for one in pool.options))


def _all_light(fleet: Fleet, e: Asked, *, max_batch: float) -> FixedPlanner:
    return all_light(fleet, e.num_gpus, max_batch=_cap(fleet.pools[0], max_batch))


def _all_heavy(fleet: Fleet, e: Asked, *, max_batch: float) -> FixedPlanner:
    return all_heavy(fleet, e.num_gpus, max_batch=_cap(fleet.pools[1], max_batch))


def _static(fleet: Fleet, e: Asked, *, peak_factor: float) -> FixedPlanner:
    return for_the_peak(fleet, e.num_gpus, peak_per_s=peak_factor * e.peak_per_s)


def _static_threshold(fleet: Fleet, _: Asked, *, threshold: float, **s: Any) -> ThresholdPlanner:
    return ThresholdPlanner(fleet, **s, fixed_threshold=threshold)


def _thresholds(**options: Any) -> Callable[..., ThresholdPlanner]:
    return lambda fleet, _, **settings: ThresholdPlanner(fleet, **settings, **options)


CASCADE_POLICIES = (
    ControlPolicy(
        "allocation",
        {"demand_quantile": 0.6, "utilisation": 0.95},
        lambda fleet, _, **s: AllocationPlanner(fleet, **s),
    ),
    ControlPolicy("all-light", {"max_batch": 4.0}, _all_light),
    ControlPolicy("all-heavy", {"max_batch": 1.0}, _all_heavy),
    ControlPolicy("proteus", _SMOOTHED, lambda fleet, _, **s: RandomScalingPlanner(fleet, **s)),
    ControlPolicy("static", {"peak_factor": 1.05}, _static),
    ControlPolicy("static-threshold", {**_SMOOTHED, "threshold": 0.05}, _static_threshold),
    ControlPolicy("diffserve", _SMOOTHED, _thresholds()),
    ControlPolicy("aimd", {**_SMOOTHED, "smoothing": 0.2}, _thresholds(adapts_batches=True)),
    ControlPolicy("queue-2", _SMOOTHED, _thresholds(wait_by_execution=2.0)),
    ControlPolicy("queue-1", _SMOOTHED, _thresholds(wait_by_execution=1.0)),
)
