"""From a cluster's state to its plan: demand, calibration, allocation, threshold.

Replicas take tens of seconds to load, so their number is planned for the demand by then. Thresholds
and batch caps act at once, so they are planned for the replicas that are ready now; else every load
would begin with an overload.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from ray_cluster.policies.allocation.allocation import allocate
from ray_cluster.policies.allocation.problem import (
    Allocation,
    AllocationProblem,
    BatchOption,
    Pool,
    Service,
    Stage,
    Supply,
)
from ray_cluster.policies.cascade import ConfidenceWindow, observe, threshold_for, window_from
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.demand import (
    Demand,
    DemandSmoothing,
    count,
    forecast_per_s,
    quantile_per_s,
)
from ray_cluster.policies.planning.fleet import Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.planning.plan import CascadePlan, Plan, PoolPlan

M = TypeVar("M")


class Planner(Protocol[M]):
    """A plan loop's decision, with a memory that the loop keeps."""

    def begin(self, state: ClusterState) -> M:
        """Return the memory before the first plan."""

    def plan(self, state: ClusterState, memory: M) -> tuple[Plan, M]:
        """Return the plan, and the memory for the next time; the loop gives plans their version."""


@dataclass(frozen=True, slots=True)
class ServiceMemory:
    """Estimates of one service."""

    service: str
    demand: Demand
    direct: Demand
    confidences: ConfidenceWindow | None
    alone: Demand


Memory = tuple[ServiceMemory, ...]


@dataclass(frozen=True, slots=True)
class AllocationPlanner:
    """Plans by exact allocation for a forecast of demand.

    Attributes:
        window_s: for which a plan is made; a replica that loads serves only the rest of it.
        drain_s: in which queues must be worked off.
        demand_quantile: of arrivals within a deadline, that must be served.
        surge_quantile: that should be, if it costs no quality.
        utilisation: share of a replica's nominal rate that is counted on, as batches are not always
            full.
        margin_share: of deadlines, reserved for what no table has.
        doubt: standard deviations by which batches may take longer and still meet deadlines.
        reserve_s: see :class:`CascadePlan`.
        gain_per_start: see :class:`AllocationProblem`.
        window_size: confidences that count.
        negligible_per_s: rate of requests below which none are expected.
    """

    fleet: Fleet
    smoothing: DemandSmoothing = DemandSmoothing()  # noqa: RUF009 - frozen
    window_s: float = 120.0
    drain_s: float = 10.0
    demand_quantile: float = 0.6
    surge_quantile: float = 0.95
    utilisation: float = 0.95
    margin_share: float = 0.04
    doubt: float = 1.0
    reserve_s: float = 0.3
    gain_per_start: int = 5
    window_size: int = 600
    negligible_per_s: float = 0.0

    def begin(self, state: ClusterState) -> Memory:
        return tuple(self._begin(spec, state) for spec in self.fleet.services)

    def _begin(self, spec: ServiceSpec, state: ClusterState) -> ServiceMemory:
        now_s, seen = state.now_s, state.service(spec.name)
        return ServiceMemory(
            spec.name,
            Demand(now_s, seen.num_arrived),
            Demand(now_s, seen.num_direct),
            window_from(spec.cascade.deferral, self.window_size) if spec.cascade else None,
            Demand(now_s, seen.num_alone),
        )

    def recalled(self, state: ClusterState, memory: Memory) -> Memory:
        """Return a memory of this fleet's services, from one of another fleet's."""
        known = {one.service: one for one in memory}
        return tuple(
            known[spec.name]
            if spec.name in known and (known[spec.name].confidences is None) != bool(spec.cascade)
            else self._begin(spec, state)
            for spec in self.fleet.services
        )

    def plan(self, state: ClusterState, memory: Memory) -> tuple[Plan, Memory]:
        memory = tuple(self._learn(one, state) for one in memory)
        return self._plan(state, memory, self.problem(state, memory)), memory

    def counts(self, state: ClusterState, memory: Memory) -> dict[str, int]:
        """Return the replicas of each pool in the plan, without the rest of it."""
        memory = tuple(self._learn(one, state) for one in memory)
        wanted = allocate(self.problem(state, memory))
        return {one.name: one.num_replicas for one in wanted.sizes}

    def _plan(self, state: ClusterState, memory: Memory, problem: AllocationProblem) -> Plan:
        wanted = allocate(problem)
        # without a threshold nothing depends on which replicas are ready
        cascading = [spec for spec in self.fleet.services if spec.cascade]
        now = allocate(self._with_ready(problem, memory, state, wanted)) if cascading else wanted
        # caps follow the replicas that serve now, counts those that will
        caps = {one.name: one.max_batch for one in (*wanted.sizes, *now.sizes)}
        pools = [PoolPlan(one.name, one.num_replicas, caps[one.name]) for one in wanted.sizes]
        cascades = [self._cascade(spec, now, memory) for spec in cascading]
        return Plan(tuple(pools), tuple(cascades), infeasible=wanted.infeasible)

    def _learn(self, memory: ServiceMemory, state: ClusterState) -> ServiceMemory:
        seen = state.service(memory.service)
        window = memory.confidences
        return ServiceMemory(
            memory.service,
            count(memory.demand, state.now_s, seen.num_arrived, self.smoothing),
            count(memory.direct, state.now_s, seen.num_direct, self.smoothing),
            observe(window, seen.confidences) if window else None,
            count(memory.alone, state.now_s, seen.num_alone, self.smoothing),
        )

    def problem(self, state: ClusterState, memory: Memory) -> AllocationProblem:
        """Return what is to be allocated: replicas for the time when they will have loaded."""
        unknown = self._models_of_unknown_demand(memory)
        return AllocationProblem(
            supplies=tuple(
                Supply(one.device, state.num_gpus(one.device), one.price)
                for one in self.fleet.devices
            ),
            pools=tuple(
                self._pool(spec, state, is_known=spec.model not in unknown)
                for spec in self.fleet.pools
            ),
            services=tuple(
                self._service(spec, one, state, ahead_s=self._load_s(spec))
                for spec, one in zip(self.fleet.services, memory, strict=True)
            ),
            drain_s=self.drain_s,
            gain_per_start=self.gain_per_start,
        )

    def _models_of_unknown_demand(self, memory: Memory) -> set[str]:
        """Models whose arrivals were not counted over any time yet."""
        unknown = {one.service for one in memory if one.demand.level_per_s is None}
        return {
            model
            for spec in self.fleet.services
            if spec.name in unknown
            for model in (spec.model, *((spec.cascade.heavy_model,) if spec.cascade else ()))
        }

    def _pool(self, spec: PoolSpec, state: ClusterState, *, is_known: bool) -> Pool:
        seen = state.pool(spec.name)
        return Pool(
            spec.name,
            spec.model,
            spec.device,
            tuple(BatchOption(one.batch, one.seconds * seen.pace) for one in spec.options),
            spec.gpus_per_replica,
            num_replicas=seen.num_replicas,
            # a planner that has just begun must not take nothing seen for nothing wanted
            num_young=seen.num_young if is_known else seen.num_replicas,
            min_replicas=spec.min_replicas,
            max_replicas=spec.max_replicas,
            lost_share=min(1.0, spec.load_s / self.window_s),
        )

    def _load_s(self, spec: ServiceSpec) -> float:
        """How long the slowest replica of the service's models takes to come."""
        models = (spec.model, *((spec.cascade.heavy_model,) if spec.cascade else ()))
        return max(pool.load_s for model in models for pool in self.fleet.pools_of(model))

    def _service(
        self, spec: ServiceSpec, memory: ServiceMemory, state: ClusterState, *, ahead_s: float
    ) -> Service:
        direct, alone = (
            self._expected_per_s(one, ahead_s) for one in (memory.direct, memory.alone)
        )
        entering = self._expected_per_s(memory.demand, ahead_s) - direct - alone
        entering = entering if entering > self.negligible_per_s else 0.0
        peak = max(entering, memory.demand.recent_peak_per_s)
        first, heavy = state.model(spec.model), None
        if spec.cascade:
            seen = state.model(spec.cascade.heavy_model)
            heavy = Stage(spec.cascade.heavy_model, seen.num_waiting)
        return Service(
            name=spec.name,
            slo_s=spec.slo_s,
            demand_per_s=self._headroom(entering, memory, spec, self.demand_quantile),
            first=Stage(spec.model, first.num_waiting),
            surge_per_s=self._headroom(peak, memory, spec, self.surge_quantile),
            heavy=heavy,
            quality=spec.cascade.quality if spec.cascade else None,
            overhead_s=spec.cascade.discriminate_s if spec.cascade else 0.0,
            direct_per_s=self._headroom(direct, memory, spec, self.demand_quantile),
            alone_per_s=self._headroom(alone, memory, spec, self.demand_quantile),
            margin_s=self._margin_s(spec, state),
            weight=spec.weight,
        )

    def _expected_per_s(self, demand: Demand, ahead_s: float) -> float:
        expected = forecast_per_s(demand, ahead_s, self.smoothing)
        return expected if expected > self.negligible_per_s else 0.0

    def _margin_s(self, spec: ServiceSpec, state: ClusterState) -> float:
        """Seconds of a deadline that expected batches must leave, for those that take longer."""
        models = (spec.model, *((spec.cascade.heavy_model,) if spec.cascade else ()))
        pools = (pool for model in models for pool in self.fleet.pools_of(model))
        spread = max(state.pool(pool.name).spread for pool in pools)
        return spec.slo_s * (1 - (1 - self.margin_share) / (1 + self.doubt * spread))

    def _headroom(
        self, mean_per_s: float, memory: ServiceMemory, spec: ServiceSpec, quantile: float
    ) -> float:
        high = quantile_per_s(mean_per_s, memory.demand.dispersion, spec.slo_s, quantile)
        return high / self.utilisation

    def _with_ready(
        self,
        problem: AllocationProblem,
        memory: Memory,
        state: ClusterState,
        wanted: Allocation,
    ) -> AllocationProblem:
        """The cascades' demand of now for the replicas that are ready and stay, and no others.

        A model whose first replica is to come counts as having one: what waits for it is told apart
        by its slack.
        """
        services = [
            self._service(spec, one, state, ahead_s=0.0)
            for spec, one in zip(self.fleet.services, memory, strict=True)
            if spec.cascade
        ]
        models = {model for one in services for model in one.models}
        pools = []
        for pool in (one for one in problem.pools if one.model in models):
            num_ready = max(1, state.pool(pool.name).num_ready)
            num = min(num_ready, wanted.size(pool.name).num_replicas)
            pools.append(
                replace(
                    pool,
                    num_replicas=num,
                    num_young=0,
                    lost_share=0.0,
                    max_replicas=num,
                    min_replicas=0,
                )
            )
        supplies = [replace(one, price=0) for one in problem.supplies]
        return replace(
            problem,
            pools=tuple(pools),
            services=tuple(services),
            supplies=tuple(supplies),
            gain_per_start=0,
        )

    def _cascade(self, spec: ServiceSpec, now: Allocation, memory: Memory) -> CascadePlan:
        window = next(one.confidences for one in memory if one.service == spec.name)
        assert window is not None, f"{spec.name} is a cascade"
        assert spec.cascade is not None, f"{spec.name} is a cascade"
        rate = now.deferral_rate(spec.name)
        return CascadePlan(
            spec.name,
            threshold_for(window, rate),
            rate,
            reserve_s=self.reserve_s,
            when_late="light",
            idle_threshold=threshold_for(window, spec.cascade.quality.best_rate),
        )
