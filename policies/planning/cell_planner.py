"""Plans a whole cell: what models call and the models need, each within what is there for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ray_cluster.policies.planning.called_models import (
    HelperDemand,
    HelperSpec,
    most_calls_per_s,
    settled_helpers,
    size_helpers,
    without_helpers,
)
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.demand import Demand, DemandSmoothing, count, forecast_per_s
from ray_cluster.policies.planning.fleet import Fleet
from ray_cluster.policies.planning.floors import Floor, above_floors
from ray_cluster.policies.planning.plan import CascadePlan, Plan
from ray_cluster.policies.planning.planner import AllocationPlanner, Memory

# a replica is stopped where the others would do with this share of their time
_CAUTION = 0.75
# of deferral rates, which are planned in thousandths
_ROUNDED = 0.002
# a demand of less than one request in so many dwell times is not worth a replica
_NEGLIGIBLE_DWELLS = 2.0
_LEAST_DWELL_S = 10.0
# a plan looks at least so far ahead, else no replica would be worth its load
_LEAST_WINDOW_S = 120.0
# queues are to be worked off in a quarter of the deadline, within these bounds
_LEAST_DRAIN_S, _MOST_DRAIN_S = 10.0, 60.0


@dataclass(frozen=True, slots=True)
class CallsMemory:
    """The estimate of the arrivals of one counter."""

    counter: str
    demand: Demand


@dataclass(frozen=True, slots=True)
class PaceMemory:
    """How long one image takes in a pool, smoothed.

    Attributes:
        seen_s: instant of the last look.
    """

    pool: str
    seen_s: float
    image_s: float


@dataclass(frozen=True, slots=True)
class CellMemory:
    """What a planner of a cell remembers; it is saved, so that the next controller has it."""

    services: Memory
    calls: tuple[CallsMemory, ...] = ()
    paces: tuple[PaceMemory, ...] = ()


@dataclass(frozen=True, slots=True)
class CellPlanner:
    """Plans the pools of a cell.

    A fleet changes while a cell runs: new pools register, costs are learnt. So there is a planner
    for each round, and memories are of services by name.

    Attributes:
        models: plans pools of models, and cascades.
        helpers: what they call.
    """

    models: AllocationPlanner
    helpers: tuple[HelperSpec, ...] = ()

    def begin(self, state: ClusterState) -> CellMemory:
        return CellMemory(self.models.begin(state), self._calls(state, ()))

    def plan(self, state: ClusterState, memory: CellMemory) -> tuple[Plan, CellMemory]:
        calls = tuple(self._counted(state, memory.calls))
        demand = self._helper_demand(calls)
        sizes = size_helpers(self.helpers, demand, state, self.models.fleet.pools)
        paces = tuple(self._paces(state, memory.paces))
        left = self._paced(without_helpers(state, self.helpers, sizes), paces)
        recalled = self.models.recalled(state, memory.services)
        plan, services = self.models.plan(left, recalled)
        plan = self._cautious(plan, left, recalled)
        free = self._free(plan, left)
        settled = settled_helpers(self.helpers, sizes, demand, state, plan, free)
        reasons = [*([plan.infeasible] if plan.infeasible else ()), *self._unfit(left)]
        plan = replace(
            plan,
            pools=(*plan.pools, *settled),
            cascades=tuple(self._freed(one) for one in plan.cascades),
            infeasible="; ".join(reasons) or None,
        )
        return above_floors(plan, self._floors(plan), state), CellMemory(services, calls, paces)

    def _counted(
        self, state: ClusterState, known: tuple[CallsMemory, ...]
    ) -> Iterator[CallsMemory]:
        """Yield what is known of calls after one more reading of their counters.

        No more are counted than there can be: what is asked beyond that is no demand of now, and
        would be remembered for long.
        """
        most_per_s = most_calls_per_s(self.helpers, state, self.models.fleet.pools)
        for one in self._calls(state, known):
            before, num_arrived = one.demand, state.service(one.counter).num_arrived
            most = before.num_arrived + most_per_s[one.counter] * (state.now_s - before.seen_s)
            counted = min(num_arrived, most)
            demand = count(before, state.now_s, counted, self.models.smoothing)
            yield replace(one, demand=replace(demand, num_arrived=num_arrived))

    def _helper_demand(self, calls: tuple[CallsMemory, ...]) -> HelperDemand:
        known = [one for one in calls if one.demand.level_per_s is not None]
        expected = {
            one.counter: forecast_per_s(one.demand, self.models.window_s / 4, self.models.smoothing)
            for one in known
        }
        recent = {one.counter: one.demand.recent_peak_per_s for one in known}
        return HelperDemand(self._worth_it(expected), self._worth_it(recent))

    def _worth_it(self, calls_per_s: dict[str, float]) -> dict[str, float]:
        least = self.models.negligible_per_s
        return {name: one if one > least else 0.0 for name, one in calls_per_s.items()}

    def _floors(self, plan: Plan) -> list[Floor]:
        """Fewest replicas: of models first, then of what they call."""
        return [
            Floor(one.name, one.device, one.gpus_per_replica, one.min_replicas)
            for one in self.models.fleet.pools
        ] + [
            # a helper that nobody could call beside it has none
            Floor(
                one.name,
                one.device,
                one.gpus_per_replica,
                min(one.min_replicas, plan.num_replicas(one.name)),
            )
            for one in self.helpers
        ]

    def _paces(self, state: ClusterState, known: tuple[PaceMemory, ...]) -> Iterator[PaceMemory]:
        """Yield how long images take, smoothed like demand.

        Where pools share cores, an image takes longer while others are made. A plan by the present
        moment alone would then defer much in every lull, and little in every crowd.
        """
        by_name = {one.pool: one for one in known}
        for spec in self.models.fleet.pools:
            image_s = spec.options[0].seconds * state.pool(spec.name).pace
            if (before := by_name.get(spec.name)) is not None:
                passed_s = max(0.0, state.now_s - before.seen_s)
                kept = math.exp(-passed_s / self.models.smoothing.level_s)
                image_s += kept * (before.image_s - image_s)
            yield PaceMemory(spec.name, state.now_s, image_s)

    def _paced(self, state: ClusterState, paces: tuple[PaceMemory, ...]) -> ClusterState:
        """Return a state in which pools are as fast as they are on average."""
        image_s = {one.pool: one.image_s for one in paces}
        expected_s = {one.name: one.options[0].seconds for one in self.models.fleet.pools}
        pools = tuple(
            replace(one, pace=image_s[one.pool] / expected_s[one.pool])
            if one.pool in image_s
            else one
            for one in state.pools
        )
        return replace(state, pools=pools)

    def _cautious(self, plan: Plan, state: ClusterState, memory: Memory) -> Plan:
        """A plan that stops only what more demand, and a shorter queue, would not need again.

        Else demand around a limit would start what it has just stopped.
        """
        free = self._free(plan, state)
        specs = {spec.name: spec for spec in self.models.fleet.pools}
        stopping = [
            specs[one.pool]
            for one in plan.pools
            if one.num_replicas < state.pool(one.pool).num_replicas
        ]
        # where there is no room to keep any of them, nothing need be asked
        if not any(spec.gpus_per_replica <= free[spec.device] for spec in stopping):
            return plan
        models = replace(
            self.models,
            utilisation=_CAUTION * self.models.utilisation,
            drain_s=_CAUTION * self.models.drain_s,
        )
        needed = models.counts(state, memory)
        pools = []
        for one in plan.pools:
            kept = min(state.pool(one.pool).num_replicas, needed.get(one.pool, 0))
            pools.append(replace(one, num_replicas=max(one.num_replicas, kept)))
        wider = replace(plan, pools=tuple(pools))
        return wider if min(self._free(wider, state).values()) >= 0 else plan

    def _unfit(self, state: ClusterState) -> Iterator[str]:
        """Say which pools have not even room for their fewest replicas, were they alone."""
        room = {one.device: one.num_gpus for one in state.devices}
        for spec in self.models.fleet.pools:
            fitting = room[spec.device] // spec.gpus_per_replica
            if fitting < spec.min_replicas:
                yield (
                    f"min_replicas of {spec.name} is {spec.min_replicas}, and {fitting} fit: each "
                    f"reserves {spec.gpus_per_replica} of the {room[spec.device]} hundredths of "
                    f"{spec.device} that are left for models"
                )

    def _free(self, plan: Plan, state: ClusterState) -> dict[str, int]:
        """What a plan of the models' pools leaves of each device; below zero if it takes more."""
        free = {one.device: one.num_gpus for one in state.devices}
        for spec in self.models.fleet.pools:
            pool = plan.pool(spec.name)
            num_replicas = 0 if pool is None else pool.num_replicas
            free[spec.device] -= spec.gpus_per_replica * num_replicas
        return free

    def _freed(self, cascade: CascadePlan) -> CascadePlan:
        """A cascade's plan without thresholds of its own where as much is deferred as may be.

        The settings' threshold then holds: one that follows from a planner's confidences would
        differ from it by chance, and so move without need.
        """
        spec = next(one for one in self.models.fleet.services if one.name == cascade.service)
        assert spec.cascade is not None, f"{cascade.service} is no cascade"
        most = spec.cascade.quality.deferral_rates[-1]
        if spec.cascade.quality.best_rate >= most - _ROUNDED:
            cascade = replace(cascade, idle_threshold=math.inf)
        if cascade.deferral_rate >= most - _ROUNDED:
            cascade = replace(cascade, threshold=math.inf)
        return cascade

    def _calls(
        self, state: ClusterState, known: tuple[CallsMemory, ...]
    ) -> tuple[CallsMemory, ...]:
        by_name = {one.counter: one for one in known}
        names = dict.fromkeys(name for one in self.helpers for name in one.counters)
        return tuple(
            by_name.get(name)
            or CallsMemory(name, Demand(state.now_s, state.service(name).num_arrived))
            for name in names
        )


def cell_planner(
    fleet: Fleet, helpers: tuple[HelperSpec, ...], *, dwell_s: float, slo_s: float
) -> CellPlanner:
    """Return the planner of a cell by its settings.

    Args:
        helpers: what the models call.
        dwell_s: age below which a replica is not stopped.
        slo_s: deadline of requests that name none.
    """
    dwell_s = max(_LEAST_DWELL_S, dwell_s)
    models = AllocationPlanner(
        fleet,
        DemandSmoothing(peak_s=dwell_s),
        window_s=max(_LEAST_WINDOW_S, 2 * dwell_s),
        drain_s=drain_s_of(slo_s),
        negligible_per_s=1 / (_NEGLIGIBLE_DWELLS * dwell_s),
    )
    return CellPlanner(models, helpers)


def drain_s_of(slo_s: float) -> float:
    """Return the seconds in which queues are to be worked off, by the deadline of requests."""
    return min(_MOST_DRAIN_S, max(_LEAST_DRAIN_S, slo_s / 4))
