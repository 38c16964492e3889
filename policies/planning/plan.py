"""Desired state of a cluster, and the actions that lead from one to another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Routing = Literal["confidence", "random"]
LateAnswer = Literal["light", "drop"]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """Replicas of a pool, and the most images that each batches."""

    pool: str
    num_replicas: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """How the images of a cascade find their model.

    Attributes:
        threshold: images of the light model with a lower confidence are deferred.
        deferral_rate: that the threshold is meant to give.
        routing: ``confidence`` is a cascade; ``random`` sends a share of the requests straight to
            the heavy model and defers nothing.
        heavy_share: that share.
        reserve_s: see :func:`ray_cluster.policies.cascade.request_threshold`; None to ignore slack.
        idle_threshold: likewise; the threshold of an image for which the heavy model stands idle,
            None for no other.
        when_late: what becomes of a deferred image that can't be in time any more: the light
            model's answer, or nothing.
    """

    service: str
    threshold: float
    deferral_rate: float = 0.0
    routing: Routing = "confidence"
    heavy_share: float = 0.0
    reserve_s: float | None = None
    when_late: LateAnswer = "light"
    idle_threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the plan loop decides.

    Attributes:
        version: rises with every plan that differs from the one before.
        infeasible: why demands can't be met, if they can't.
    """

    pools: tuple[PoolPlan, ...] = ()
    cascades: tuple[CascadePlan, ...] = ()
    version: int = 0
    infeasible: str | None = field(default=None, compare=False)

    def pool(self, name: str) -> PoolPlan | None:
        return next((one for one in self.pools if one.pool == name), None)

    def num_replicas(self, pool: str) -> int:
        """Return a pool's replicas; a pool that the plan does not name has none."""
        found = self.pool(pool)
        return 0 if found is None else found.num_replicas

    def cascade(self, service: str) -> CascadePlan | None:
        return next((one for one in self.cascades if one.service == service), None)


@dataclass(frozen=True, slots=True)
class PlannedSettings:
    """What changes without starting or stopping a replica; one versioned message."""

    version: int
    max_batches: tuple[tuple[str, int], ...]
    cascades: tuple[CascadePlan, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """A pool's number of replicas, before and after."""

    pool: str
    num_before: int
    num_after: int


@dataclass(frozen=True, slots=True)
class PlanDiff:
    """Actions between two plans, in the order in which they are to be done.

    Attributes:
        settings: None if nothing in them is new.
        stops: pools that shrink, first, for their GPUs are needed.
        starts: pools that grow.
    """

    settings: PlannedSettings | None
    stops: tuple[Scale, ...]
    starts: tuple[Scale, ...]

    @property
    def scales(self) -> tuple[Scale, ...]:
        return (*self.stops, *self.starts)


def planned_settings_of(plan: Plan) -> PlannedSettings:
    """Return what a plan says beside replica counts."""
    batches = tuple((one.pool, one.max_batch) for one in plan.pools)
    return PlannedSettings(plan.version, batches, plan.cascades)


def settled(old: Plan, new: Plan, *, within: float) -> Plan:
    """Return the new plan, with the thresholds of the old one where they hardly differ.

    Args:
        within: difference of thresholds below which the old one stays.
    """
    return replace(new, cascades=tuple(_settled(old, one, within) for one in new.cascades))


def _settled(old: Plan, new: CascadePlan, within: float) -> CascadePlan:
    before = old.cascade(new.service)
    if before is None or _without_thresholds(new) != _without_thresholds(before):
        return new
    pairs = (
        (before.threshold, new.threshold),
        (before.idle_threshold or 0.0, new.idle_threshold or 0.0),
    )
    # infinite thresholds are equal, too
    is_near = all(one == other or abs(one - other) < within for one, other in pairs)
    return before if is_near else new


def _without_thresholds(cascade: CascadePlan) -> CascadePlan:
    return replace(cascade, threshold=0.0, deferral_rate=0.0, idle_threshold=None)


def bounded(actions: PlanDiff, most_scales: int) -> PlanDiff:
    """Return the first actions, so that no more than so many pools change."""
    stops = actions.stops[:most_scales]
    return replace(actions, stops=stops, starts=actions.starts[: most_scales - len(stops)])


def diff(old: Plan, new: Plan) -> PlanDiff:
    """Return the actions that make an old plan into a new one."""
    names = dict.fromkeys(one.pool for plan in (old, new) for one in plan.pools)
    scales = [Scale(name, old.num_replicas(name), new.num_replicas(name)) for name in names]
    before, after = planned_settings_of(old), planned_settings_of(new)
    is_same = dict(before.max_batches) == dict(after.max_batches)
    is_same = is_same and set(before.cascades) == set(after.cascades)
    return PlanDiff(
        settings=None if is_same else after,
        stops=tuple(one for one in scales if one.num_after < one.num_before),
        starts=tuple(one for one in scales if one.num_after > one.num_before),
    )
