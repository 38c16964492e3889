"""Proteus: as many requests to the better model as load leaves room for, whichever they are.

As DiffServe compares it (section 4.1): replicas of both models by load, and requests dealt out at
random. A request waits for at most so many executions of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_cluster.policies.baselines.cascade_choice import (
    ArrivalAverage,
    CascadeSizing,
    highest_share,
    light_alone,
    pools_of,
    two_models,
)
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import Fleet
from ray_cluster.policies.planning.plan import CascadePlan, Plan


@dataclass(frozen=True, slots=True)
class RandomMemory:
    """Demand and the last choice."""

    demand: ArrivalAverage
    choice: CascadeSizing | None = None


@dataclass(frozen=True, slots=True)
class RandomScalingPlanner:
    """The planner.

    Attributes:
        smoothing: weight of the last interval in the moving average.
        demand_factor: by which demand is multiplied.
        wait_by_execution: executions that a request is taken to wait.
        most_heavy_batch: none above is tried.
    """

    fleet: Fleet
    smoothing: float = 0.5
    demand_factor: float = 1.05
    wait_by_execution: float = 1.0
    most_heavy_batch: int = 32

    def begin(self, state: ClusterState) -> RandomMemory:
        name = two_models(self.fleet).service.name
        return RandomMemory(ArrivalAverage(state.now_s, state.service(name).num_arrived))

    def plan(self, state: ClusterState, memory: RandomMemory) -> tuple[Plan, RandomMemory]:
        models = two_models(self.fleet)
        average = memory.demand.observe(state, models.service.name, self.smoothing)
        factor, slo_s = 1 + self.wait_by_execution, models.service.slo_s
        pairs = [
            (light, heavy)
            for light in models.light.options
            for heavy in models.heavy.options
            if factor * max(light.seconds, heavy.seconds) <= slo_s
            and heavy.batch <= self.most_heavy_batch
        ]
        demand = self.demand_factor * (average.per_s or 0.0)
        num_gpus = state.num_gpus(models.light.device)
        found = highest_share(pairs, num_gpus=num_gpus, demand_per_s=demand)
        choice = found or memory.choice or light_alone(models, num_gpus)
        cascade = CascadePlan(
            models.service.name,
            0.0,
            choice.rate,
            routing="random",
            heavy_share=choice.rate,
            when_late="drop",
        )
        infeasible = None if found else "no share leaves enough capacity"
        plan = Plan(pools_of(choice, models), (cascade,), infeasible=infeasible)
        return plan, RandomMemory(average, choice)
