"""An allocation that knows all rates beforehand, though no single arrival and no failure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ray_cluster.policies.allocation import allocate
from ray_cluster.policies.cluster_state import ClusterState
from ray_cluster.policies.demand import quantile_per_s
from ray_cluster.policies.plan import Plan, PoolPlan
from ray_cluster.policies.planner import AllocationPlanner, Memory
from ray_cluster.simulator.autoscaling_experiment import AutoscalingExperiment


@dataclass(frozen=True, slots=True)
class ClairvoyantPlanner:
    """The same allocation, for the highest rate until a replica started next would have loaded."""

    planner: AllocationPlanner
    experiment: AutoscalingExperiment
    begin_s: float

    def begin(self, state: ClusterState) -> Memory:
        """Return what the planner remembers."""
        return self.planner.begin(state)

    def plan(self, state: ClusterState, memory: Memory) -> tuple[Plan, Memory]:
        """Return the plan for the rates to come."""
        problem = self.planner.problem(state, memory)
        services = []
        for service, one in zip(problem.services, self.experiment.workloads, strict=True):
            ahead_s = self.experiment.load_s + 2 * self.experiment.period_s
            times_s = state.now_s - self.begin_s + np.linspace(0.0, ahead_s, 20)
            peak = float(self.experiment.curve(one).at(times_s).max())
            spread, planner = self.experiment.cv**2, self.planner
            demand, surge = (
                quantile_per_s(peak, spread, one.slo_s, quantile) / planner.utilisation
                for quantile in (planner.demand_quantile, planner.surge_quantile)
            )
            services.append(replace(service, demand_per_s=demand, surge_per_s=surge))
        found = allocate(replace(problem, services=tuple(services)))
        pools = tuple(PoolPlan(one.name, one.num_replicas, one.max_batch) for one in found.sizes)
        return Plan(pools, infeasible=found.infeasible), memory
