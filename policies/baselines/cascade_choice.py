"""What published cascade planners share: demand as a moving average, and their choices.

They state mixed-integer programs. With one cascade on equal GPUs the optimum is found by trying all
pairs of batches: as few light replicas as carry the demand, and the rest heavy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.planning.plan import CascadePlan, Plan, PoolPlan

THRESHOLDS = tuple(number / 200 for number in range(201))
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class TwoModels:
    """A cascade's service and its two pools on one type of GPU."""

    service: ServiceSpec
    light: PoolSpec
    heavy: PoolSpec


def two_models(fleet: Fleet) -> TwoModels:
    """Return the only cascade of a fleet.

    Raises:
        ValueError: the fleet is not one cascade on equal GPUs.
    """
    if len(fleet.services) != 1 or len(fleet.pools) != 2 or len(fleet.devices) != 1:
        raise ValueError(f"this policy plans one cascade on equal GPUs; given {fleet}")
    service = fleet.services[0]
    if service.cascade is None:
        raise ValueError(f"this policy plans a cascade; given {service}")
    (light,), (heavy,) = fleet.pools_of(service.model), fleet.pools_of(service.cascade.heavy_model)
    return TwoModels(service, light, heavy)


@dataclass(frozen=True, slots=True)
class ArrivalAverage:
    """Exponential moving average of the arrivals per interval.

    Attributes:
        per_s: None before the first interval.
    """

    seen_s: float
    num_arrived: float
    per_s: float | None = None

    def observe(self, state: ClusterState, service: str, weight: float) -> ArrivalAverage:
        """Return the average with the interval that ends now, which has that weight."""
        passed_s, seen = state.now_s - self.seen_s, state.service(service)
        if passed_s <= 0:
            return self
        rate = (seen.num_arrived - self.num_arrived) / passed_s
        level = rate if self.per_s is None else self.per_s + weight * (rate - self.per_s)
        return replace(self, seen_s=state.now_s, num_arrived=seen.num_arrived, per_s=level)


@dataclass(frozen=True, slots=True)
class CascadeSizing:
    """Replicas and batches of both models; a threshold, or a share of requests for the heavy one.

    Attributes:
        rate: that is deferred, or sent to the heavy model.
    """

    num_light: int
    num_heavy: int
    light_batch: int
    heavy_batch: int
    threshold: float
    rate: float


def highest_threshold(
    pairs: Iterable[tuple[BatchOption, BatchOption]],
    *,
    num_gpus: int,
    demand_per_s: float,
    rate_at: Callable[[float], float],
    thresholds: Sequence[float] = THRESHOLDS,
) -> CascadeSizing | None:
    """Return the choice with the highest threshold that demand leaves room for.

    DiffServe, section 3.3, equations 2 to 5; the latency (equation 1) is in the pairs.

    Args:
        pairs: batches of the light and the heavy model that keep the deadline.
        rate_at: deferral rate of a threshold.
        thresholds: that may be chosen, rising.

    Returns:
        None if even the lowest is too much.
    """
    rates = [rate_at(threshold) for threshold in thresholds]
    best: CascadeSizing | None = None
    for light, heavy in pairs:
        num_light = max(1, math.ceil(demand_per_s / light.rate_per_s - _EPSILON))
        num_heavy = num_gpus - num_light
        if num_heavy < 0:
            continue
        room = num_heavy * heavy.rate_per_s / demand_per_s if demand_per_s > 0 else 1.0
        fitting = [n for n, rate in enumerate(rates) if rate <= room + _EPSILON]
        if fitting and (best is None or thresholds[fitting[-1]] > best.threshold):
            at = fitting[-1]
            best = CascadeSizing(
                num_light, num_heavy, light.batch, heavy.batch, thresholds[at], rates[at]
            )
    return best


def highest_share(
    pairs: Iterable[tuple[BatchOption, BatchOption]], *, num_gpus: int, demand_per_s: float
) -> CascadeSizing | None:
    """Return the choice that sends most requests to the heavy model instead of the light one."""
    best: CascadeSizing | None = None
    for light, heavy in pairs:
        for num_heavy in range(num_gpus + 1):
            num_light = num_gpus - num_heavy
            room = num_heavy * heavy.rate_per_s
            share = min(1.0, room / demand_per_s) if demand_per_s > 0 else 1.0
            rest = (1 - share) * demand_per_s
            fits = rest <= num_light * light.rate_per_s + _EPSILON
            if fits and (best is None or share > best.rate + _EPSILON):
                best = CascadeSizing(num_light, num_heavy, light.batch, heavy.batch, 0.0, share)
    return best


def light_alone(models: TwoModels, num_gpus: int) -> CascadeSizing:
    """Return the choice that is left where a deadline or a demand has room for nothing else."""
    batch = models.light.options[0]
    for option in models.light.options:
        if option.seconds <= models.service.slo_s and option.rate_per_s > batch.rate_per_s:
            batch = option
    return CascadeSizing(num_gpus, 0, batch.batch, 1, threshold=0.0, rate=0.0)


def plan_of(choice: CascadeSizing, models: TwoModels) -> Plan:
    """Return a choice as the plan of a cascade whose late images are dropped, as published."""
    name = models.service.name
    cascade = CascadePlan(name, choice.threshold, choice.rate, when_late="drop")
    return Plan(pools_of(choice, models), (cascade,))


def pools_of(choice: CascadeSizing, models: TwoModels) -> tuple[PoolPlan, PoolPlan]:
    """Return a choice's replicas and batches."""
    return (
        PoolPlan(models.light.name, choice.num_light, choice.light_batch),
        PoolPlan(models.heavy.name, choice.num_heavy, choice.heavy_batch),
    )
