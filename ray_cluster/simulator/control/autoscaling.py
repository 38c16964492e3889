"""Experiment files of the kind ``autoscaling``: models alone, over a day with failures and loads.

What counts is how many requests are in time, for how many GPU-hours, with how many changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.allocation.allocation import allocate
from ray_cluster.policies.baselines.ongoing_requests import OngoingRequestsPlanner
from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.demand import DemandSmoothing, quantile_per_s
from ray_cluster.policies.planning.fleet import DeviceSpec, Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.planning.plan import Plan, PoolPlan
from ray_cluster.policies.planning.planner import AllocationPlanner, Memory, Planner
from ray_cluster.simulator.arrivals import RateCurve, daily_rate, draw_arrivals
from ray_cluster.simulator.control.cluster import options_of, whole_image
from ray_cluster.simulator.control.course import Course
from ray_cluster.simulator.control.experiment import (
    Column,
    ControlExperiment,
    ControlPolicy,
    ControlRun,
    GapCv,
    LoadSeconds,
    PeriodSeconds,
    Rate,
    Seconds,
    Setting,
    begin_of,
    check_day,
)
from ray_cluster.simulator.control.scaling import Faults
from ray_cluster.simulator.reports import Line
from ray_cluster.simulator.workload import Arrival

_ATTAINMENT = Column("attainment", "on time, %", 100, 2)
_HOURS = Column("gpu_hours", "GPU-hours")
_COLUMNS = (
    *(_ATTAINMENT, Column("worst", "worst service, %", 100, 2), _HOURS),
    *(Column("num_plan_changes", "changes"), Column("num_starts", "starts")),
)
_WORDS = (
    "What is dropped or late is not on time. A GPU counts as long as it is held, loading or "
    "serving. Changes are rounds that start or stop replicas, starts the replicas that they add."
)


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

    def pool(self, *, batching_gain: float, load_s: float) -> PoolSpec:
        """Return its pool; ValueError if the profile has no such images, or not in time."""
        profile = load_profile(self.profile)
        options = options_of(profile, self.steps, self.side_px, batching_gain=batching_gain)
        if self.max_batch > options[-1].batch:
            raise ValueError(
                f"max_batch must be at most {options[-1].batch}, the largest of {self.profile}; "
                f"given {self.max_batch}"
            )
        if self.slo_s < options[0].seconds:
            raise ValueError(
                f"slo_s: given {self.slo_s:g}; allowed: at least {options[0].seconds:.2f}, for an "
                "image alone"
            )
        # each service has GPUs of its own, whatever their type is called
        device = f"{self.service} {profile.device}"
        return PoolSpec(self.service, self.service, device, options, load_s=load_s)


@dataclass(frozen=True, slots=True)
class ClairvoyantPlanner:
    """An allocation that knows all rates beforehand, though no single arrival and no failure.

    It plans for the highest rate until a replica started next would have loaded.
    """

    planner: AllocationPlanner
    experiment: AutoscalingExperiment

    def begin(self, state: ClusterState) -> Memory:
        return self.planner.begin(state)

    def plan(self, state: ClusterState, memory: Memory) -> tuple[Plan, Memory]:
        experiment, planner = self.experiment, self.planner
        problem = planner.problem(state, memory)
        ahead_s = experiment.load_s + 2 * experiment.period_s
        times_s = state.now_s - begin_of(experiment) + np.linspace(0.0, ahead_s, 20)
        services = []
        for service, one in zip(problem.services, experiment.workloads, strict=True):
            peak = float(experiment.curve(one).at(times_s).max())
            demand, surge = (
                quantile_per_s(peak, experiment.cv**2, one.slo_s, quantile) / planner.utilisation
                for quantile in (planner.demand_quantile, planner.surge_quantile)
            )
            services.append(replace(service, demand_per_s=demand, surge_per_s=surge))
        found = allocate(replace(problem, services=tuple(services)))
        pools = tuple(PoolPlan(one.name, one.num_replicas, one.max_batch) for one in found.sizes)
        return Plan(pools, infeasible=found.infeasible), memory


def _allocation(fleet: Fleet, _: AutoscalingExperiment, **settings: Any) -> AllocationPlanner:
    smoothing = DemandSmoothing(level_s=30, slope_s=90, dispersion_s=300, peak_s=120)
    return AllocationPlanner(fleet, smoothing=smoothing, **settings)


def _ongoing(fleet: Fleet, e: AutoscalingExperiment, **settings: Any) -> OngoingRequestsPlanner:
    caps = tuple((one.service, one.max_batch) for one in e.workloads)
    most = max(one.num_gpus for one in e.workloads)
    return OngoingRequestsPlanner(fleet, caps, max_replicas=most, **settings)


_ALLOCATION = {"utilisation": 0.9, "surge_quantile": 0.95}
_ONGOING = {"target_ongoing_requests": 2.0, "upscale_delay_s": 30.0, "downscale_delay_s": 600.0}


class AutoscalingExperiment(ControlExperiment):
    """What is simulated: a day squeezed into two hours, so that loads and failures weigh more.

    Its figures are `attainment` (share of all requests in time), `worst` (of the service whose
    share is lowest), `gpu_hours` (for which GPUs were held, loading or serving), `num_plan_changes`
    (rounds that started or stopped replicas) and `num_starts` (replicas that rounds added).
    """

    POLICIES = (
        ControlPolicy("allocation", _ALLOCATION, _allocation),
        ControlPolicy("ongoing-requests", _ONGOING, _ongoing),
        ControlPolicy(
            "clairvoyant",
            _ALLOCATION,
            lambda fleet, e, **s: ClairvoyantPlanner(_allocation(fleet, e, **s), e),
        ),
    )
    TRADE_OFF: ClassVar[tuple[str, str]] = ("cost", "requests on time against GPU-hours")
    BARS = "how many GPUs serve, load or are broken"
    STREAM = 9

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
        self.check_rounds()
        return self

    @property
    def span_s(self) -> float:
        return self.duration_s + max(60.0, *(2 * one.slo_s for one in self.workloads))

    @property
    def faults(self) -> Faults | None:
        if self.failure_every_s is None:
            return None
        return Faults(mean_s_between=self.failure_every_s, repair_s=self.repair_s)

    @property
    def young_s(self) -> float:
        return self.dwell_s

    def setting(self) -> Setting:
        """Read the profiles; errors as of :meth:`ControlExperiment.setting`."""
        pools = []
        for one in self.workloads:
            try:
                pools.append(one.pool(batching_gain=self.batching_gain, load_s=self.load_s))
            except ValueError as error:
                raise ValueError(f"the workload {one.service}: {error}") from None
        pairs = list(zip(self.workloads, pools, strict=True))
        fleet = Fleet(
            tuple(DeviceSpec(pool.device, price=one.price) for one, pool in pairs),
            tuple(pools),
            tuple(ServiceSpec(one.service, one.service, one.slo_s) for one in self.workloads),
        )
        profiles = [load_profile(one.profile) for one in self.workloads]
        num_gpus = {pool.device: one.num_gpus for one, pool in pairs}
        return Setting(fleet, profiles, num_gpus, _COLUMNS, _WORDS, (_HOURS, _ATTAINMENT))

    def curve(self, workload: Workload) -> RateCurve:
        return daily_rate(workload.low_per_s, workload.high_per_s, self.duration_s)

    def requests(self, seed: int) -> list[Arrival]:
        found = []
        for stream, one in enumerate(self.workloads):
            rng = np.random.default_rng([seed, stream])
            arrivals = draw_arrivals(self.curve(one), rng, cv=self.cv)
            found += [(at_s, one.service, one.slo_s) for at_s in arrivals.tolist()]
        return [whole_image(*one) for one in sorted(found)]

    def initial(self, _planner: Planner[Any]) -> Plan:
        """The replicas that the file says."""
        return Plan(
            tuple(PoolPlan(one.service, one.num_initial, one.max_batch) for one in self.workloads)
        )

    def figures_of(self, run: ControlRun) -> dict[str, float]:
        num_by_service = Counter(one.slo_class for one in run.requests)
        on_time = Counter(one.arrival.slo_class for one in run.fates if one.is_met)
        actions = [one.report.actions for one in run.rounds if one.report.actions]
        starts = [start for one in actions for start in one.starts]
        shares = [on_time[name] / num for name, num in num_by_service.items()]
        return {
            "attainment": on_time.total() / max(1, len(run.requests)),
            "worst": min(shares, default=0.0),
            "gpu_hours": run.gpu_hours,
            "num_plan_changes": run.num_plan_changes,
            "num_starts": sum(one.num_after - one.num_before for one in starts),
            "num_requests": len(run.requests),
        }

    def panels(self, courses: Mapping[str, Course]) -> dict[str, dict[str, Line]]:
        """Requests of the first policy's run, and the replicas of each policy."""

        def ready(course: Course, pool: str) -> Line:
            return course.by_round(lambda state: state.pool(pool).num_ready)

        def loading(course: Course) -> Line:
            return course.by_round(lambda state: sum(one.num_loading for one in state.pools))

        return {
            "requests per second": courses[self.policies[0]].requests_per_s,
            **{
                f"{one.service}: ready": {
                    name: ready(course, one.service) for name, course in courses.items()
                }
                for one in self.workloads
            },
            "loading": {name: loading(course) for name, course in courses.items()},
            "images waiting": {name: course.waiting for name, course in courses.items()},
            "not on time, %": {
                name: one.by_bin(100 * one.missed_shares) for name, one in courses.items()
            },
        }
