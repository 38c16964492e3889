"""Replicas of what models call: discriminators and ControlNets, by the demand of who calls them.

They come after the models' fewest replicas, and there are no more of them than the models beside
them can call: a helper that nobody is left to call is worth nothing. What they keep beyond their
demand, so that a short lull stops nothing, is of what models leave.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import PoolSpec
from ray_cluster.policies.planning.plan import Plan, PoolPlan

# of a replica's time, that is counted on: calls come unevenly, and a step waits for the answer
_UTILISATION = 0.7


@dataclass(frozen=True, slots=True)
class Caller:
    """A pool of models whose replicas call a helper.

    Attributes:
        calls_per_s: of one busy replica at most.
    """

    pool: str
    calls_per_s: float


@dataclass(frozen=True, slots=True)
class HelperSpec:
    """A pool that other pools' replicas call.

    Attributes:
        counters: names whose arrivals call it.
        rate_per_s: calls that a busy replica answers.
        max_batch: calls that it answers together at most.
        gpus_per_replica: in the units of the device's :class:`DeviceState`.
        min_replicas: fewest; none stops the last one, for whoever calls it waits.
        callers: who calls it; empty where that is not known.
    """

    name: str
    device: str
    counters: tuple[str, ...]
    rate_per_s: float
    max_batch: int
    gpus_per_replica: int = 1
    min_replicas: int = 1
    callers: tuple[Caller, ...] = ()

    def __post_init__(self) -> None:
        if not (self.rate_per_s > 0 and self.gpus_per_replica >= 1):
            raise ValueError(f"{self.name} needs a rate and a share of a device; given {self}")

    def num_for(self, calls_per_s: float, *, utilisation: float = _UTILISATION) -> int:
        """Return the replicas that answer so many calls."""
        return max(self.min_replicas, math.ceil(calls_per_s / (utilisation * self.rate_per_s)))

    def calls_of(self, plan: Plan) -> float:
        """Return the calls per second of a plan's models at most; infinite if nobody knows."""
        if not self.callers:
            return math.inf
        return sum(one.calls_per_s * plan.num_replicas(one.pool) for one in self.callers)


@dataclass(frozen=True, slots=True)
class HelperDemand:
    """Calls per second by counter; of one that is missing nothing is known yet.

    Attributes:
        expected_per_s: that are to be answered.
        recent_per_s: of the busiest moment lately.
    """

    expected_per_s: Mapping[str, float]
    recent_per_s: Mapping[str, float]

    def of(self, spec: HelperSpec) -> float | None:
        """Return the calls that are expected; None while that is not known."""
        return _sum_of(self.expected_per_s, spec)

    def peak_of(self, spec: HelperSpec) -> float | None:
        """Return those of the busiest moment, likewise."""
        return _sum_of(self.recent_per_s, spec)


def _sum_of(per_s: Mapping[str, float], spec: HelperSpec) -> float | None:
    found = [per_s.get(name) for name in spec.counters]
    known = [one for one in found if one is not None]
    return sum(known) if len(known) == len(found) else None


def size_helpers(
    helpers: Sequence[HelperSpec],
    demand: HelperDemand,
    state: ClusterState,
    pools: Sequence[PoolSpec] = (),
) -> tuple[PoolPlan, ...]:
    """Return the replicas of each helper that models must leave to it.

    First each gets its fewest, then those one more that lack the largest part of what they need,
    for as long as the models that are left could call more than is answered.

    Args:
        pools: of the models, in the same cell.
    """
    sizing = _Sizing(helpers, demand, state, pools)
    sizing.grow()
    return tuple(PoolPlan(one.name, sizing.sizes[one.name], one.max_batch) for one in helpers)


def most_calls_per_s(
    helpers: Sequence[HelperSpec], state: ClusterState, pools: Sequence[PoolSpec]
) -> dict[str, float]:
    """Return how many calls there can be, by counter: of all models that fit beside one helper.

    What comes faster than that waits, whatever is planned.
    """
    sizing = _Sizing(helpers, HelperDemand({}, {}), state, pools)
    return {name: sizing.callable_per_s(spec) for spec in helpers for name in spec.counters}


class _Sizing:
    """Replicas of helpers while they are dealt out, one by one."""

    def __init__(
        self,
        helpers: Sequence[HelperSpec],
        demand: HelperDemand,
        state: ClusterState,
        pools: Sequence[PoolSpec],
    ) -> None:
        self._helpers = helpers
        self._demand = demand
        self._state = state
        self._pools = {one.name: one for one in pools}
        self._left = Counter({one.device: one.num_gpus for one in state.devices})
        # kept for the fewest replicas of models, and one caller at least
        self._floors: Counter[str] = Counter()
        for one in pools:
            self._floors[one.device] += one.min_replicas * one.gpus_per_replica
        self.sizes: Counter[str] = Counter()

    def grow(self) -> None:
        """Deal out replicas until nobody needs or finds another."""
        for spec in self._helpers:
            while self.sizes[spec.name] < spec.min_replicas and self._fits(spec):
                self._add(spec)
        while short := [one for one in self._helpers if self._lacks(one) > 0 and self._fits(one)]:
            self._add(max(short, key=self._lacks))

    def _add(self, spec: HelperSpec) -> None:
        self.sizes[spec.name] += 1
        self._left[spec.device] -= spec.gpus_per_replica

    def _fits(self, spec: HelperSpec) -> bool:
        kept = self._floors[spec.device]
        callers = [self._pools[one.pool] for one in spec.callers if one.pool in self._pools]
        if callers and not any(one.min_replicas for one in callers):
            # a helper without anybody who calls it would starve them for ever
            near = [one.gpus_per_replica for one in callers if one.device == spec.device]
            kept += min(near) if len(near) == len(callers) else 0
        return spec.gpus_per_replica + kept <= self._left[spec.device]

    def _lacks(self, spec: HelperSpec) -> float:
        """Return the part of its calls that a helper does not answer; 0 if no more helps."""
        num, demand = self.sizes[spec.name], self._demand.of(spec)
        if demand is None:
            # a planner that has just begun must not take nothing seen for nothing wanted
            seen = self._state.pool(spec.name).num_replicas
            return (seen - num) / seen if num < seen else 0.0
        # one more is taken from the models that would call it
        needed_per_s = min(demand, self.callable_per_s(spec))
        answered_per_s = num * _UTILISATION * spec.rate_per_s
        return 1 - answered_per_s / needed_per_s if answered_per_s < needed_per_s else 0.0

    def callable_per_s(self, spec: HelperSpec) -> float:
        """Return the calls per second of the models, with all that one more helper leaves."""
        callers = [(self._pools.get(one.pool), one.calls_per_s) for one in spec.callers]
        known = [(pool, per_s) for pool, per_s in callers if pool is not None]
        if not known:
            return math.inf
        left = self._left.copy()
        left[spec.device] -= spec.gpus_per_replica
        own: Counter[str] = Counter()
        for pool, _ in known:
            own[pool.device] += pool.min_replicas * pool.gpus_per_replica
        for device in left:
            left[device] -= self._floors[device] - own[device]
        total_per_s = 0.0
        for pool, per_s in sorted(known, key=lambda one: -one[1] / one[0].gpus_per_replica):
            fitting = max(0, left[pool.device]) // pool.gpus_per_replica
            num = fitting if pool.max_replicas is None else min(fitting, pool.max_replicas)
            left[pool.device] -= num * pool.gpus_per_replica
            total_per_s += num * per_s
        return total_per_s


def without_helpers(
    state: ClusterState, helpers: Sequence[HelperSpec], plans: Sequence[PoolPlan]
) -> ClusterState:
    """Return the state as it is for the models: with the devices that helpers leave to them."""
    used: Counter[str] = Counter()
    for spec, plan in zip(helpers, plans, strict=True):
        used[spec.device] += plan.num_replicas * spec.gpus_per_replica
    devices = tuple(
        replace(one, num_gpus=max(0, one.num_gpus - used[one.device])) for one in state.devices
    )
    return replace(state, devices=devices)


def settled_helpers(
    helpers: Sequence[HelperSpec],
    sizes: Sequence[PoolPlan],
    demand: HelperDemand,
    state: ClusterState,
    plan: Plan,
    free: Mapping[str, int],
) -> Iterator[PoolPlan]:
    """Yield the replicas of helpers beside a plan of the models.

    Those that these models cannot call are given back. One that is there and was needed lately, or
    has just come, stays as long as no model needs its device; and one replica fewer is taken only
    where the demand would fit even with half of what is spare: so demand around a limit starts and
    stops nothing.

    Args:
        sizes: what :func:`size_helpers` has found.
        plan: of the models, with what these leave.
        free: what it leaves of each device.
    """
    left = Counter(free)
    for spec, size in zip(helpers, sizes, strict=True):
        seen, expected, peak = state.pool(spec.name), demand.of(spec), demand.peak_of(spec)
        num, most = size.num_replicas, seen.num_replicas
        if expected is not None and peak is not None:
            # a model's first replica may call before it is planned
            callable_per_s = max(spec.calls_of(plan), spec.calls_of(_present(plan, state)))
            num = min(num, spec.num_for(min(expected, callable_per_s)))
            cautious = spec.num_for(max(expected, peak), utilisation=_UTILISATION**2)
            most = min(most, max(cautious, seen.num_young))
        left[spec.device] += (size.num_replicas - num) * spec.gpus_per_replica
        more = max(0, min(most - num, left[spec.device] // spec.gpus_per_replica))
        left[spec.device] -= more * spec.gpus_per_replica
        yield replace(size, num_replicas=num + more)


def _present(plan: Plan, state: ClusterState) -> Plan:
    present = (replace(one, num_replicas=state.pool(one.pool).num_ready) for one in plan.pools)
    return replace(plan, pools=tuple(present))
