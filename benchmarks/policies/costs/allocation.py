"""What an allocation costs, and a whole round of the planner with its two of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.policies.costs.problems import LARGEST, LOST_SHARE, draw_problem
from benchmarks.policies.costs.samples import DecisionCost, Samples
from benchmarks.policies.costs.settings import CostSettings
from benchmarks.settings import Report
from ray_cluster.models.cascade_curves import load_curves
from ray_cluster.policies.allocation.allocation import allocate
from ray_cluster.policies.allocation.problem import AllocationProblem, Service
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
from ray_cluster.policies.planning.planner import AllocationPlanner

AIM_MS = 50.0
# seconds for which a plan is made, and between two of them
_WINDOW_S, _PERIOD_S = 120.0, 10.0
# confidences of a cascade that come in between two rounds, at most
_NUM_CONFIDENCES = 600
_CURVES = load_curves("diffserve-1")


def measure_allocation(settings: CostSettings, report: Report) -> Iterator[DecisionCost]:
    """Time allocations and planning rounds of random clusters of every size."""
    # what is loaded and made with the first problem is no part of any
    allocate(draw_problem(0, size=settings.clusters[0]))
    num_done, num_all = 0, settings.problems * len(settings.clusters)
    for size in settings.clusters:
        samples, num_proven = Samples(), 0
        for seed in range(settings.problems):
            report(num_done / num_all, f"{size.gpus} GPUs, {size.pools} pools")
            problem = draw_problem(seed, size=size)
            plan = samples.timed("allocation", partial(allocate, problem))
            num_proven += plan.is_proven
            planner, before, after = planning_round(problem)
            memory = planner.begin(before)
            samples.timed("planning round", partial(planner.plan, after, memory))
            num_done += 1
        load = f"{size.pools} pools"
        aim_ms = AIM_MS if size == LARGEST else None
        yield samples.row(
            "allocation",
            gpus=size.gpus,
            load=load,
            aim_ms=aim_ms,
            of_all=True,
            num_proven=num_proven,
        )
        yield samples.row("planning round", gpus=size.gpus, load=load)


def planning_round(
    problem: AllocationProblem,
) -> tuple[AllocationPlanner, ClusterState, ClusterState]:
    """Return a planner, and two states between which the problem's demand has come."""
    prices = {one.device: one.price for one in problem.supplies}
    fleet = Fleet(
        tuple(DeviceSpec(device, price) for device, price in prices.items()),
        tuple(
            PoolSpec(one.name, one.model, one.device, one.options, load_s=LOST_SHARE * _WINDOW_S)
            for one in problem.pools
        ),
        tuple(_spec(one) for one in problem.services),
    )
    planner = AllocationPlanner(fleet, window_s=_WINDOW_S, gain_per_start=problem.gain_per_start)
    return planner, _state(problem, 0.0), _state(problem, _PERIOD_S)


def _spec(service: Service) -> ServiceSpec:
    cascade = None
    if service.heavy is not None and service.quality is not None:
        heavy, quality = service.heavy.model, service.quality
        cascade = CascadeSpec(heavy, quality, _CURVES.deferral, service.overhead_s)
    return ServiceSpec(service.name, service.first.model, service.slo_s, cascade)


def _state(problem: AllocationProblem, now_s: float) -> ClusterState:
    stages = [one for service in problem.services for one in (service.first, service.heavy) if one]
    return ClusterState(
        now_s,
        tuple(DeviceState(one.device, one.num_gpus) for one in problem.supplies),
        tuple(
            PoolState(one.name, one.num_replicas, num_young=one.num_young) for one in problem.pools
        ),
        tuple(ModelState(one.model, one.num_waiting) for one in stages),
        tuple(
            ServiceState(
                one.name,
                int(one.demand_per_s * now_s),
                confidences=_confidences(one, now_s) if one.heavy else (),
            )
            for one in problem.services
        ),
    )


def _confidences(service: Service, now_s: float) -> tuple[float, ...]:
    """Of the images since the last look, evenly spread."""
    count = min(_NUM_CONFIDENCES, int(service.demand_per_s * now_s))
    return tuple((number + 0.5) / count for number in range(count))
