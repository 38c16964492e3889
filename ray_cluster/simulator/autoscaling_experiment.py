"""Experiment: models alone on two types of GPU, over a day with failures and slow loads.

What counts is how many requests are in time, for how many GPU-hours, with how many changes. Beside
the planner stand Ray Serve's autoscaling by ongoing requests, and an allocation that knows all
rates beforehand (though no single arrival and no failure). Every figure is simulated; seconds are
those of published and modelled latency tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ray_cluster.policies.allocation import allocate
from ray_cluster.policies.allocation_problem import BatchOption
from ray_cluster.policies.cluster_state import ClusterState
from ray_cluster.policies.demand import quantile_per_s
from ray_cluster.policies.fleet import DeviceSpec, Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.latency import LatencyProfile
from ray_cluster.policies.plan import Plan, PoolPlan, knobs_of
from ray_cluster.policies.planner import AllocationPlanner, Memory, Planner
from ray_cluster.profiles.files import load_profile
from ray_cluster.simulator.arrivals import RateCurve, daily_rate, draw_arrivals
from ray_cluster.simulator.cascade_experiment import batch_options
from ray_cluster.simulator.cluster import SimulatedCluster
from ray_cluster.simulator.controlled import run_controlled
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.jobs import Job
from ray_cluster.simulator.outcomes import Faults

_SDXL_STEPS = 50
_SDXL_PX = 1024


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one service over the day.

    Attributes:
        num_gpus: that there are of its type.
        num_initial: replicas that are loaded when the day begins.
    """

    service: str
    low_per_s: float
    high_per_s: float
    slo_s: float
    num_gpus: int
    num_initial: int


@dataclass(frozen=True, slots=True)
class AutoscalingExperiment:
    """What is simulated: a day squeezed into two hours, so that loads and failures weigh more.

    Attributes:
        dwell_s: age below which a replica counts as young.
    """

    sd15: Workload = Workload("sd15", 1.0, 8.0, 10.0, 16, 3)
    sdxl: Workload = Workload("sdxl", 0.3, 3.0, 15.0, 12, 2)
    duration_s: float = 7200.0
    cv: float = 1.3
    period_s: float = 10.0
    load_s: float = 40.0
    noise_cv: float = 0.03
    dwell_s: float = 120.0
    faults: Faults | None = Faults(mean_s_between=3600.0, repair_s=120.0)  # noqa: RUF009 - frozen
    batching_gain: float = 1.0

    @property
    def workloads(self) -> tuple[Workload, ...]:
        """Both services."""
        return (self.sd15, self.sdxl)

    def fleet(self) -> Fleet:
        """Pools and services, from the profiles."""
        sd15, sdxl = load_profile("sd15-a100"), load_profile("sdxl-h100")
        options = (batch_options(sd15, self.batching_gain), _sdxl_options(sdxl))
        devices = ("A100", "H100")
        return Fleet(
            (DeviceSpec("A100", price=3), DeviceSpec("H100", price=7)),
            tuple(
                PoolSpec(one.service, one.service, device, some, load_s=self.load_s)
                for one, device, some in zip(self.workloads, devices, options, strict=True)
            ),
            tuple(ServiceSpec(one.service, one.service, one.slo_s) for one in self.workloads),
        )

    def curve(self, workload: Workload) -> RateCurve:
        """A service's rate over the day."""
        return daily_rate(workload.low_per_s, workload.high_per_s, self.duration_s)

    def jobs(self, seed: int) -> list[Job]:
        """The requests of a seed, in the order of arrival."""
        found = []
        for stream, one in enumerate(self.workloads):
            rng = np.random.default_rng([seed, stream])
            arrivals = draw_arrivals(self.curve(one), rng, cv=self.cv)
            found += [(at_s, one.service, one.slo_s) for at_s in arrivals.tolist()]
        return [
            Job(number, service, at_s, at_s + slo_s, confidence=1.0, coin=0.0)
            for number, (at_s, service, slo_s) in enumerate(sorted(found))
        ]


def _sdxl_options(profile: LatencyProfile) -> tuple[BatchOption, ...]:
    """Whole images from the table's steps."""
    rows = [row for row in profile.of("step") if row.key.width_px == _SDXL_PX]
    return tuple(BatchOption(row.key.batch, _SDXL_STEPS * row.seconds) for row in rows)


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


@dataclass(frozen=True, slots=True)
class AutoscalingRow:
    """One policy on one seed.

    Attributes:
        attainment: share of all requests that were in time.
        worst: of the service whose share is lowest.
        gpu_hours: for which GPUs were held, loading or serving.
        num_plan_changes: rounds that started or stopped replicas.
        num_starts: replicas that rounds asked for beside those that there were.
    """

    policy: str
    seed: int
    attainment: float
    worst: float
    gpu_hours: float
    num_plan_changes: int
    num_starts: int
    num_requests: int


def run_day(
    experiment: AutoscalingExperiment, policy: str, planner: Planner[Any], seed: int
) -> AutoscalingRow:
    """Simulate one policy on one seed, from a few replicas that are loaded already."""
    events = EventQueue()
    fleet = experiment.fleet()
    numbers = {
        pool.device: one.num_gpus
        for pool, one in zip(fleet.pools, experiment.workloads, strict=True)
    }
    cluster = SimulatedCluster(
        events,
        fleet,
        numbers,
        np.random.default_rng([seed, 9]),
        noise_cv=experiment.noise_cv,
        faults=experiment.faults,
        dwell_s=experiment.dwell_s,
    )
    initial = Plan(tuple(PoolPlan(one.service, one.num_initial, 4) for one in experiment.workloads))
    cluster.turn(knobs_of(initial))
    for pool in initial.pools:
        cluster.scale(pool.pool, pool.num_replicas)
    events.run(begin_of(experiment))
    hours_before, jobs = cluster.gpu_hours, experiment.jobs(seed)
    reports = run_controlled(
        events,
        cluster,
        planner,
        jobs,
        initial=initial,
        period_s=experiment.period_s,
        span_s=experiment.duration_s + 60.0,
    )
    assert len(cluster.outcomes) + cluster.num_running == len(jobs)
    shares = []
    for one in experiment.workloads:
        num = sum(job.service == one.service for job in jobs)
        on_time = sum(out.on_time for out in cluster.outcomes if out.service == one.service)
        shares.append(on_time / num)
    scales = [one for report in reports if report.actions for one in report.actions.starts]
    return AutoscalingRow(
        policy=policy,
        seed=seed,
        attainment=sum(one.on_time for one in cluster.outcomes) / len(jobs),
        worst=min(shares),
        gpu_hours=cluster.gpu_hours - hours_before,
        num_plan_changes=sum(bool(one.actions and one.actions.scales) for one in reports),
        num_starts=sum(one.num_after - one.num_before for one in scales),
        num_requests=len(jobs),
    )


def begin_of(experiment: AutoscalingExperiment) -> float:
    """Return the instant at which the day begins: when the first loads are over."""
    return 3 * experiment.load_s
