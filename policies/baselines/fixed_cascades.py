"""Plans that never change: one model for all requests, or a cascade provisioned for the peak.

Clipper-Light, Clipper-Heavy and DiffServe-Static of DiffServe's section 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from ray_cluster.policies.baselines.cascade_choice import highest_threshold, plan_of, two_models
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import Fleet
from ray_cluster.policies.planning.plan import CascadePlan, Plan, PoolPlan


@dataclass(frozen=True, slots=True)
class FixedPlanner:
    """Always the same plan."""

    fixed: Plan

    def begin(self, state: ClusterState) -> None:
        """There is nothing to remember."""

    def plan(self, state: ClusterState, memory: None) -> tuple[Plan, None]:  # noqa: ARG002
        return self.fixed, None


def all_light(fleet: Fleet, num_gpus: int, *, max_batch: int) -> FixedPlanner:
    """Return the planner that answers every request with the light model."""
    models = two_models(fleet)
    pools = (PoolPlan(models.light.name, num_gpus, max_batch), PoolPlan(models.heavy.name, 0, 1))
    cascade = CascadePlan(models.service.name, 0.0, when_late="drop")
    return FixedPlanner(Plan(pools, (cascade,)))


def all_heavy(fleet: Fleet, num_gpus: int, *, max_batch: int) -> FixedPlanner:
    """Return the planner that answers every request with the heavy model."""
    models = two_models(fleet)
    pools = (PoolPlan(models.light.name, 0, 1), PoolPlan(models.heavy.name, num_gpus, max_batch))
    cascade = CascadePlan(
        models.service.name, 0.0, 1.0, routing="random", heavy_share=1.0, when_late="drop"
    )
    return FixedPlanner(Plan(pools, (cascade,)))


def for_the_peak(
    fleet: Fleet, num_gpus: int, *, peak_per_s: float, most_heavy_batch: int = 32
) -> FixedPlanner:
    """Return the planner of a cascade whose threshold and replicas suit the highest demand.

    Raises:
        ValueError: no threshold does.
    """
    models = two_models(fleet)
    cascade = models.service.cascade
    assert cascade is not None
    budget_s = models.service.slo_s - cascade.discriminate_s
    pairs = [
        (light, heavy)
        for light in models.light.options
        for heavy in models.heavy.options
        if light.seconds + heavy.seconds <= budget_s and heavy.batch <= most_heavy_batch
    ]
    choice = highest_threshold(
        pairs, num_gpus=num_gpus, demand_per_s=peak_per_s, rate_at=cascade.deferral.rate_at
    )
    if choice is None:
        raise ValueError(f"{num_gpus} GPUs can't carry a peak of {peak_per_s}/s")
    return FixedPlanner(plan_of(choice, models))
