"""What there is to plan with, and how it is, from what the dispatcher shows of its cell.

Devices are counted in hundredths: of CPUs for pools on CPUs, of GPUs for the others, as Ray
reserves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType

from ray_cluster.config.kinds import KINDS
from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve, capped
from ray_cluster.policies.costs.cost_model import decode_s, step_s, work_of
from ray_cluster.policies.planning.called_models import Caller, HelperSpec
from ray_cluster.policies.planning.cluster_state import (
    ClusterState,
    DeviceState,
    ModelState,
    PoolState,
    ServiceState,
)
from ray_cluster.policies.planning.fleet import (
    CascadeSpec,
    DeviceSpec,
    Fleet,
    PoolSpec,
    ServiceSpec,
)
from ray_cluster.policies.planning.plan import Plan
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.controller import (
    ModelQueue,
    Observation,
    ObservedCascade,
    ObservedPool,
    TypicalRequest,
)
from ray_cluster.protocol.leases import lane_of
from ray_cluster.requests import SMALL_SIDE_PX

HUNDRED = 100
# from Serve's decision until a worker begins to load its model: a process and its imports
START_S = 5.0
# what a discriminator looks at, and what a ControlNet computes where nobody says
_SMALL = TypicalRequest(SMALL_SIDE_PX, SMALL_SIDE_PX, 1, uses_guidance=False)
# median requests take so many times as long as predicted at most, for plans
_MOST_SPREAD = 1.0

CurvesOf = Callable[[str], "Curves"]
"""Returns the curves of a cascade by what the settings say of them."""


@dataclass(frozen=True, slots=True)
class Curves:
    """What is known of a cascade's quality and confidences; by default, next to nothing."""

    quality: QualityCurve = QualityCurve((0.0, 1.0), (1.0, 0.0))  # noqa: RUF009 - frozen
    deferral: DeferralCurve = DeferralCurve((0.0, 1.0), (0.0, 1.0))  # noqa: RUF009 - frozen


@dataclass(frozen=True, slots=True)
class Asked:
    """What the plan loop has asked for last of a pool.

    Attributes:
        at_s: Unix time; long ago for what was there before the loop.
    """

    num_replicas: int
    at_s: float = -math.inf


NOTHING_ASKED: Mapping[str, Asked] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CellFleet:
    """A fleet, and the pools that its models call."""

    fleet: Fleet
    helpers: tuple[HelperSpec, ...]

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of all pools that are planned."""
        return (*(one.name for one in self.fleet.pools), *(one.name for one in self.helpers))


def share_of(pool: ObservedPool) -> int:
    """Return the hundredths of its device that a replica reserves, at least one."""
    reserved = pool.num_cpus if pool.device == "cpu" else pool.num_gpus
    return max(1, round(HUNDRED * reserved))


def fleet_of(seen: Observation, curves_of: CurvesOf) -> CellFleet:
    """Return the fleet of a cell: every pool that has had a worker.

    A cascade is planned once workers of both of its models have been seen; before, each model is
    planned alone.
    """
    pools = [one for one in seen.pools if one.kind == "denoise" and one.typical is not None]
    served = {one.serves for one in pools}
    cascades = [one for one in seen.cascades if {one.light, one.heavy} <= served]
    in_cascades = {model for one in cascades for model in (one.light, one.heavy)}
    services = [_cascade_service(one, seen, curves_of) for one in cascades]
    services += [
        ServiceSpec(model, model, seen.default_slo_s)
        for model in dict.fromkeys(one.serves for one in pools)
        if model not in in_cascades
    ]
    devices = dict.fromkeys(one.device for one in seen.pools)
    fleet = Fleet(
        tuple(DeviceSpec(one) for one in devices), tuple(map(_pool, pools)), tuple(services)
    )
    return CellFleet(fleet, tuple(_helpers(seen)))


def _pool(pool: ObservedPool) -> PoolSpec:
    return PoolSpec(
        name=pool.pool,
        model=pool.serves,
        device=pool.device,
        options=options_of(pool),
        gpus_per_replica=share_of(pool),
        load_s=START_S + pool.load_s,
        # who is working is not stopped for want of demand
        min_replicas=max(pool.min_replicas, int(any(one.num_held for one in pool.replicas))),
        max_replicas=pool.max_replicas,
    )


def options_of(pool: ObservedPool) -> tuple[BatchOption, ...]:
    """Return the batches that a pool may be capped at: its bound, and 1, 2, 3, 4, 6, 8, 12, ...

    With powers of two alone, a little less time would halve what a replica is taken to make.
    """
    assert pool.typical is not None, f"{pool.pool} makes no images"
    cost, bound = present_cost(pool), pool.max_batch
    steps = (part << power for power in range(bound.bit_length()) for part in (1, 3))
    sizes = {bound, *(one for one in steps if one < bound)}
    return tuple(BatchOption(size, images_s(cost, pool.typical, size)) for size in sorted(sizes))


def present_cost(pool: ObservedPool) -> StepCost:
    """Return the step cost of the median live replica; of the last one where none lives."""
    if not pool.replicas:
        return pool.step_cost
    costs = [one.step_cost for one in pool.replicas]
    typical = pool.typical or _SMALL
    middle = median(images_s(one, typical, 1) for one in costs)
    return min(costs, key=lambda one: abs(images_s(one, typical, 1) - middle))


def images_s(cost: StepCost, typical: TypicalRequest, num_images: int) -> float:
    """Return the seconds in which a replica makes so many images together."""
    view = typical.view
    steps_s = typical.num_steps * step_s(cost, work_of([view] * num_images))
    return max(1e-6, steps_s + num_images * decode_s(cost, view))


def _cascade_service(
    cascade: ObservedCascade, seen: Observation, curves_of: CurvesOf
) -> ServiceSpec:
    curves = Curves() if cascade.curves is None else curves_of(cascade.curves)
    most = cascade.most_deferred
    if most is None:
        most = curves.deferral.rate_at(cascade.threshold or 0.0)
    judge = [one for one in seen.pools if one.pool == cascade.discriminator]
    score_s = images_s(present_cost(judge[0]), _SMALL, 1) if judge else 0.0
    spec = CascadeSpec(cascade.heavy, capped(curves.quality, most), curves.deferral, score_s)
    return ServiceSpec(cascade.name, cascade.light, seen.default_slo_s, spec)


def _helpers(seen: Observation) -> Iterator[HelperSpec]:
    """Yield all that is called for images of models.

    A ControlNet answers denoising steps; all others answer images.
    """
    for pool in seen.pools:
        if pool.kind != "denoise":
            yield HelperSpec(
                name=pool.pool,
                device=pool.device,
                counters=(lane_of(pool.kind, pool.serves),),
                rate_per_s=pool.max_batch
                / images_s(present_cost(pool), _called_with(pool, seen), pool.max_batch),
                max_batch=pool.max_batch,
                gpus_per_replica=share_of(pool),
                callers=tuple(_callers(pool, seen)),
            )


def _callers(pool: ObservedPool, seen: Observation) -> Iterator[Caller]:
    """Yield the pools that call a helper, with what one busy replica calls at most."""
    for one in seen.pools:
        if one.serves in pool.callers and one.typical is not None:
            per_image = one.typical.num_steps if pool.kind == "control" else 1
            images_per_s = max(option.rate_per_s for option in options_of(one))
            yield Caller(one.pool, per_image * images_per_s)


def _called_with(pool: ObservedPool, seen: Observation) -> TypicalRequest:
    """Return what one call of a helper computes: one step, of the largest default image.

    That of a last stage is of the image that it makes.
    """
    images = [one.typical for one in seen.pools if one.typical is not None]
    if pool.kind == "score" or not images:
        return _SMALL
    largest = max(images, key=lambda one: one.width_px * one.height_px * (1 + one.uses_guidance))
    scale, guided = KINDS[pool.kind].scale, pool.kind == "control" and largest.uses_guidance
    return TypicalRequest(scale * largest.width_px, scale * largest.height_px, 1, guided)


def state_of(
    seen: Observation,
    planned: CellFleet,
    *,
    supply: Mapping[str, int],
    targets: Mapping[str, int],
    asked: Mapping[str, Asked] = NOTHING_ASKED,
    in_force: Plan | None = None,
) -> ClusterState:
    """Return the plan loop's view of a cell.

    Args:
        supply: hundredths of each device.
        targets: replicas that Serve is to keep, by pool.
        asked: replicas that the plan loop has asked for, by pool.
        in_force: the plan as far as it is applied.
    """
    return ClusterState(
        now_s=seen.now_s,
        devices=tuple(
            DeviceState(one.device, supply.get(one.device, 0)) for one in planned.fleet.devices
        ),
        pools=tuple(
            _pool_state(one, seen, targets.get(one.pool), asked.get(one.pool))
            for one in seen.pools
            if one.pool in planned.pools
        ),
        models=tuple(_model_state(one, seen) for one in seen.models),
        services=(*_service_states(seen, planned), *_counters(seen)),
        in_force=in_force,
    )


def _model_state(queue: ModelQueue, seen: Observation) -> ModelState:
    """Return a model's queue: leases that are in no batch wait, too, though in a replica."""
    replicas = [one for pool in seen.pools if pool.serves == queue.model for one in pool.replicas]
    num_in_batches = min(queue.num_leased, sum(one.max_batch for one in replicas))
    num_waiting = queue.num_waiting + queue.num_leased - num_in_batches
    return ModelState(queue.model, num_waiting, num_in_batches)


def _pool_state(
    pool: ObservedPool, seen: Observation, target: int | None, asked: Asked | None
) -> PoolState:
    num_ready, dwell_s = len(pool.replicas), seen.limits.dwell_s
    num_loading = 0 if target is None else max(0, target - num_ready)
    num_young = num_loading + sum(one.age_s < dwell_s for one in pool.replicas)
    if asked is not None:
        # what has just been asked for stays; what somebody else has started need not
        is_new = seen.now_s - asked.at_s < dwell_s
        num_young = asked.num_replicas if is_new else min(num_young, asked.num_replicas)
        num_young = min(num_young, num_ready + num_loading)
    spread = seen.queue(pool.serves).safety_factor - 1 if pool.kind == "denoise" else 0.0
    return PoolState(
        pool.pool,
        num_ready,
        num_loading,
        num_young,
        spread=round(min(_MOST_SPREAD, max(0.0, spread)), 1),
    )


def _service_states(seen: Observation, planned: CellFleet) -> Iterator[ServiceState]:
    cascades = {one.name: one for one in seen.cascades}
    for spec in planned.fleet.services:
        cascade = cascades.get(spec.name)
        if cascade is None:
            yield ServiceState(spec.name, seen.num_wanted(spec.name))
            continue
        direct, alone = seen.num_wanted(cascade.heavy), seen.num_wanted(cascade.light)
        yield ServiceState(
            spec.name,
            seen.num_wanted(spec.name) + direct + alone,
            num_direct=direct,
            num_alone=alone,
            confidences=cascade.confidences,
        )


def _counters(seen: Observation) -> Iterator[ServiceState]:
    """Yield what calls helpers: images that cascades score, or for last stages, and steps with a
    ControlNet.

    Of what was accepted alone: nobody calls a helper for a request that is not made.
    """
    for pool in seen.pools:
        lane = lane_of(pool.kind, pool.serves)
        if pool.kind == "score":
            callers = [one.name for one in seen.cascades if one.discriminator == pool.pool]
            yield ServiceState(lane, sum(map(seen.num_accepted, callers)))
        elif pool.kind != "denoise":
            yield ServiceState(lane, seen.num_accepted(lane))
