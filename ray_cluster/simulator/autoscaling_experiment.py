"""Experiment: models alone on two types of GPU, over a day with failures and slow loads.

What counts is how many requests are in time, for how many GPU-hours, with how many changes. Beside
the planner stand Ray Serve's autoscaling by ongoing requests, and an allocation that knows all
rates beforehand (though no single arrival and no failure). Every figure is simulated; seconds are
those of published and modelled latency tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ray_cluster.models.profiles import load_profile
from ray_cluster.policies.allocation_problem import BatchOption
from ray_cluster.policies.fleet import DeviceSpec, Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.latency import LatencyProfile
from ray_cluster.policies.plan import Plan, PoolPlan, knobs_of
from ray_cluster.policies.planner import Planner
from ray_cluster.simulator.arrivals import RateCurve, daily_rate, draw_arrivals
from ray_cluster.simulator.batch_tables import image_options, step_options
from ray_cluster.simulator.cluster import SimulatedCluster
from ray_cluster.simulator.control_course import ControlResult, course_of
from ray_cluster.simulator.control_experiment import (
    ControlExperiment,
    GapCv,
    LoadSeconds,
    PeriodSeconds,
    Rate,
    Seconds,
    check_day,
)
from ray_cluster.simulator.controlled import Round, num_plan_changes, run_controlled
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.jobs import SimulatedRequest
from ray_cluster.simulator.outcomes import Faults, SimulatedOutcome

# of what is shown over time
BIN_S = 60.0


class Workload(BaseModel):
    """Requests of one service over the day, and the GPUs that it has for itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    service: str = Field(min_length=1, pattern=r"^[a-z0-9-]+$")
    profile: str = Field(description="a latency profile, by its name or path")
    steps: int | None = Field(None, ge=1, le=1000, description="of an image; for profiles of steps")
    side_px: int = Field(1024, ge=8, le=16384, description="of an image; for profiles of steps")
    low_per_s: Rate
    high_per_s: Rate
    slo_s: Seconds
    num_gpus: int = Field(ge=1, le=1024)
    num_initial: int = Field(1, ge=1, le=1024, description="replicas when the day begins")
    max_batch: int = Field(4, ge=1, le=1024, description="of policies that choose none")
    price: int = Field(1, ge=0, le=1000, description="of a GPU")

    @model_validator(mode="after")
    def _check_initial(self) -> Workload:
        if self.num_initial > self.num_gpus:
            raise ValueError(
                f"num_initial must be at most num_gpus, {self.num_gpus}; given {self.num_initial}"
            )
        return self

    def options(self, batching_gain: float) -> tuple[BatchOption, ...]:
        """Return the batches of its profile; ValueError if there are none, or not of the size."""
        profile = load_profile(self.profile)
        if self.steps is None:
            found = image_options(profile, batching_gain)
        else:
            found = step_options(
                profile, steps=self.steps, side_px=self.side_px, batching_gain=batching_gain
            )
        if self.max_batch > found[-1].batch:
            raise ValueError(
                f"max_batch must be at most {found[-1].batch}, the largest of {self.profile}; "
                f"given {self.max_batch}"
            )
        return found


class AutoscalingExperiment(ControlExperiment):
    """What is simulated: a day squeezed into two hours, so that loads and failures weigh more."""

    kind: Literal["autoscaling"]
    # a tenth would share its random numbers with failures
    workloads: tuple[Workload, ...] = Field(min_length=1, max_length=9)
    duration_s: Seconds = 7200.0
    cv: GapCv = 1.3
    period_s: PeriodSeconds = 10.0
    load_s: LoadSeconds = 40.0
    dwell_s: float = Field(
        120.0, ge=0, le=86400, description="age below which a replica counts as young"
    )
    failure_every_s: Seconds | None = Field(
        3600.0, ge=10, description="of one GPU that is held, on average; none fails if empty"
    )
    repair_s: Seconds = 120.0

    @model_validator(mode="after")
    def _check_workloads(self) -> AutoscalingExperiment:
        names = [one.service for one in self.workloads]
        if len(set(names)) < len(names):
            raise ValueError(f"services must differ from each other; given {', '.join(names)}")
        for one in self.workloads:
            try:
                check_day(one.low_per_s, one.high_per_s, self.duration_s)
            except ValueError as error:
                raise ValueError(f"the workload {one.service}: {error}") from None
        return self

    @property
    def span_s(self) -> float:
        """Seconds from the first request until the last has ended."""
        return self.duration_s + max(60.0, *(2 * one.slo_s for one in self.workloads))

    @property
    def faults(self) -> Faults | None:
        """How often GPUs fail."""
        if self.failure_every_s is None:
            return None
        return Faults(mean_s_between=self.failure_every_s, repair_s=self.repair_s)

    @property
    def profiles(self) -> tuple[LatencyProfile, ...]:
        """Of each service."""
        return tuple(load_profile(one.profile) for one in self.workloads)

    @property
    def gpus_by_type(self) -> dict[str, int]:
        """How many each service has."""
        return {_device(one): one.num_gpus for one in self.workloads}

    def fleet(self) -> Fleet:
        """Pools and services, from the profiles.

        Raises:
            ConfigError: a profile can't be read.
            ValueError: it lacks such images, or a deadline is too short for one.
        """
        pools = tuple(self._pool(one) for one in self.workloads)
        return Fleet(
            tuple(
                DeviceSpec(pool.device, price=one.price)
                for pool, one in zip(pools, self.workloads, strict=True)
            ),
            pools,
            tuple(ServiceSpec(one.service, one.service, one.slo_s) for one in self.workloads),
        )

    def _pool(self, one: Workload) -> PoolSpec:
        try:
            options = one.options(self.batching_gain)
        except ValueError as error:
            raise ValueError(f"the workload {one.service}: {error}") from None
        if one.slo_s < options[0].seconds:
            raise ValueError(
                f"the workload {one.service}: slo_s: given {one.slo_s:g}; allowed: at least "
                f"{options[0].seconds:.2f}, for an image alone"
            )
        return PoolSpec(one.service, one.service, _device(one), options, load_s=self.load_s)

    def curve(self, workload: Workload) -> RateCurve:
        """A service's rate over the day."""
        return daily_rate(workload.low_per_s, workload.high_per_s, self.duration_s)

    def jobs(self, seed: int) -> list[SimulatedRequest]:
        """The requests of a seed, in the order of arrival."""
        found = []
        for stream, one in enumerate(self.workloads):
            rng = np.random.default_rng([seed, stream])
            arrivals = draw_arrivals(self.curve(one), rng, cv=self.cv)
            found += [(at_s, one.service, one.slo_s) for at_s in arrivals.tolist()]
        return [
            SimulatedRequest(number, service, at_s, at_s + slo_s, confidence=1.0, coin=0.0)
            for number, (at_s, service, slo_s) in enumerate(sorted(found))
        ]


def _device(workload: Workload) -> str:
    """Each service has GPUs of its own, whatever their type is called."""
    return f"{workload.service} {load_profile(workload.profile).device}"


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
) -> ControlResult[AutoscalingRow]:
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
    initial = Plan(
        tuple(PoolPlan(one.service, one.num_initial, one.max_batch) for one in experiment.workloads)
    )
    cluster.turn(knobs_of(initial))
    for pool in initial.pools:
        cluster.scale(pool.pool, pool.num_replicas)
    events.run(begin_of(experiment))
    hours_before, jobs = cluster.gpu_hours, experiment.jobs(seed)
    rounds = run_controlled(
        events,
        cluster,
        planner,
        jobs,
        initial=initial,
        period_s=experiment.period_s,
        span_s=experiment.span_s,
    )
    assert len(cluster.outcomes) + cluster.num_running == len(jobs)
    row = _row(policy, seed, jobs, cluster.outcomes, rounds)
    course = course_of(jobs, cluster.outcomes, rounds, begin_s=begin_of(experiment), bin_s=BIN_S)
    return ControlResult(replace(row, gpu_hours=cluster.gpu_hours - hours_before), course)


def _row(
    policy: str,
    seed: int,
    jobs: Sequence[SimulatedRequest],
    outcomes: Sequence[SimulatedOutcome],
    rounds: Sequence[Round],
) -> AutoscalingRow:
    """All but the GPU-hours."""
    num_by_service = Counter(job.service for job in jobs)
    on_time = Counter(one.service for one in outcomes if one.on_time)
    starts = [one for each in rounds if each.report.actions for one in each.report.actions.starts]
    return AutoscalingRow(
        policy=policy,
        seed=seed,
        attainment=on_time.total() / max(1, len(jobs)),
        worst=min((on_time[one] / num for one, num in num_by_service.items()), default=0.0),
        gpu_hours=0.0,
        num_plan_changes=num_plan_changes(rounds),
        num_starts=sum(one.num_after - one.num_before for one in starts),
        num_requests=len(jobs),
    )


def begin_of(experiment: AutoscalingExperiment) -> float:
    """Return the instant at which the day begins: when the first loads are over."""
    return 3 * experiment.load_s
