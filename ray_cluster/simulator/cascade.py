"""Experiment files of the kind ``cascade``: a light model before a heavy one, over a day.

DiffServe's setting (section 4.1): SD-Turbo and SD1.5 on 16 A100, a day of 4 to 32 requests per
second in 350 s, deadlines of 5 s. Dropped and late requests are violations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, model_validator

from ray_cluster.models.profiles import load_profile
from ray_cluster.policies.baselines.fixed_cascades import (
    FixedPlanner,
    all_heavy,
    all_light,
    for_the_peak,
)
from ray_cluster.policies.baselines.random_scaling import RandomScalingPlanner
from ray_cluster.policies.baselines.threshold_maximising import ThresholdPlanner
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve
from ray_cluster.policies.fleet import CascadeSpec, DeviceSpec, Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.latency import LatencyProfile
from ray_cluster.policies.plan import Plan, PoolPlan
from ray_cluster.policies.planner import AllocationPlanner, Planner
from ray_cluster.simulator.arrivals import daily_rate, draw_arrivals
from ray_cluster.simulator.batch_tables import image_options
from ray_cluster.simulator.control_course import Course
from ray_cluster.simulator.control_experiment import (
    Column,
    ControlExperiment,
    ControlPolicy,
    ControlRun,
    GapCv,
    LoadSeconds,
    PeriodSeconds,
    Rate,
    Seconds,
    check_day,
)
from ray_cluster.simulator.reports import Line
from ray_cluster.simulator.requests import SimulatedRequest

SERVICE = "images"
DEVICE = "A100"
_MOST_BINS = 100_000
# published with cascade 1: FID at a light share of 0, 0.1, ... 1
_FID_BY_LIGHT_TENTHS = (
    *(18.55, 17.85, 17.33, 16.98, 16.79, 16.95),
    *(17.26, 17.95, 18.86, 20.17, 22.77),
)
CASCADE_FID = QualityCurve(tuple(n / 10 for n in range(11)), _FID_BY_LIGHT_TENTHS[::-1])
# published points of the same cascade, and those at which optimal allocations are published
CASCADE_DEFERRAL = DeferralCurve(
    (0.0, 0.05, 0.1, 0.15, 0.2, 0.215, 0.26, 0.3, 0.485, 0.5, 1.0),
    (0.0, 0.36, 0.449, 0.514, 0.582, 0.602, 0.722, 0.788, 0.964, 0.993, 1.0),
)
_SMOOTHED = {"smoothing": 0.5, "demand_factor": 1.05}
_VIOLATIONS = Column("violations", "violations, %", 100, 2)
_FID = Column("fid", "FID", 1, 2)


def _cap(pool: PoolSpec, max_batch: float) -> int:
    """A batch that is in the pool's table."""
    return min(int(max_batch), max(one.batch for one in pool.options))


def _all_light(fleet: Fleet, e: CascadeExperiment, *, max_batch: float) -> FixedPlanner:
    return all_light(fleet, e.num_gpus, max_batch=_cap(fleet.pools[0], max_batch))


def _all_heavy(fleet: Fleet, e: CascadeExperiment, *, max_batch: float) -> FixedPlanner:
    return all_heavy(fleet, e.num_gpus, max_batch=_cap(fleet.pools[1], max_batch))


def _static(fleet: Fleet, e: CascadeExperiment, *, peak_factor: float) -> FixedPlanner:
    return for_the_peak(fleet, e.num_gpus, peak_per_s=peak_factor * e.high_per_s)


def _static_threshold(
    fleet: Fleet, _: CascadeExperiment, *, threshold: float, **smoothed: float
) -> ThresholdPlanner:
    return ThresholdPlanner(fleet, **smoothed, fixed_threshold=threshold)  # type: ignore[arg-type]


class CascadeExperiment(ControlExperiment):
    """What is simulated.

    Its figures are `violations` (share of the requests that were dropped or late), `deferral` (time
    mean of the heavy model's share of the answers), `fid` (of the table at that mean; for random
    routing, on the line between its ends), `fid_over_time` (mean of the table's values at every
    bin's share), `kept` (share of the answers that are light for want of time) and
    `num_plan_changes` (rounds that started or stopped replicas).
    """

    POLICIES = (
        ControlPolicy(
            "allocation",
            {"demand_quantile": 0.6, "utilisation": 0.95},
            lambda fleet, _, **s: AllocationPlanner(fleet, **s),
        ),
        ControlPolicy("all-light", {"max_batch": 4.0}, _all_light),
        ControlPolicy("all-heavy", {"max_batch": 1.0}, _all_heavy),
        ControlPolicy("proteus", _SMOOTHED, lambda fleet, _, **s: RandomScalingPlanner(fleet, **s)),
        ControlPolicy("static", {"peak_factor": 1.05}, _static),
        ControlPolicy("static-threshold", {**_SMOOTHED, "threshold": 0.05}, _static_threshold),
        ControlPolicy("diffserve", _SMOOTHED, lambda fleet, _, **s: ThresholdPlanner(fleet, **s)),
        ControlPolicy(
            "aimd",
            {**_SMOOTHED, "smoothing": 0.2},
            lambda fleet, _, **s: ThresholdPlanner(fleet, **s, adapts_batches=True),
        ),
        ControlPolicy(
            "queue-2",
            _SMOOTHED,
            lambda fleet, _, **s: ThresholdPlanner(fleet, **s, wait_by_execution=2.0),
        ),
        ControlPolicy(
            "queue-1",
            _SMOOTHED,
            lambda fleet, _, **s: ThresholdPlanner(fleet, **s, wait_by_execution=1.0),
        ),
    )
    COLUMNS = (
        _VIOLATIONS,
        _FID,
        Column("fid_over_time", "FID over time", 1, 2),
        Column("deferral", "deferred, %", 100, 1),
        Column("kept", "kept, %", 100, 2),
        Column("num_plan_changes", "changes", 1, 1),
    )
    WORDS = (
        "Dropped and late requests are violations. FID is the published table's at the mean "
        "deferral, FID over time the mean of its values at the deferrals of every bin. Kept are "
        "light answers that should have been deferred; changes are rounds that start or stop "
        "replicas."
    )
    TRADE_OFF: ClassVar[tuple[str, str]] = ("quality", "quality against violations")
    AXES = (_VIOLATIONS, _FID)
    BARS = "how many GPUs have which model"
    STREAM = 3

    kind: Literal["cascade"]
    num_gpus: int = Field(16, ge=2, le=1024)
    low_per_s: Rate = 4.0
    high_per_s: Rate = 32.0
    duration_s: Seconds = 350.0
    cvs: tuple[GapCv, ...] = Field(
        (1.1, 1.3, 1.5), min_length=1, description="a seed takes the one at its remainder"
    )
    slo_s: Seconds = 5.0
    period_s: PeriodSeconds = 2.0
    load_s: LoadSeconds = 0.0
    num_scorers: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="replicas that score images, beside the GPUs; light replicas do it if empty",
    )
    light_profile: str = "sd-turbo-a100"
    heavy_profile: str = "sd15-a100"
    bin_s: float = Field(5.0, ge=0.1, le=86400, description="of the time means")
    confidence_power: float = Field(
        1.0,
        gt=0,
        le=100,
        description="real confidences are the curve's to this power; above 1 prompts are harder "
        "than was known beforehand",
    )

    @model_validator(mode="after")
    def _check_requests(self) -> CascadeExperiment:
        check_day(self.low_per_s, self.high_per_s, self.duration_s)
        if self.duration_s > _MOST_BINS * self.bin_s:
            raise ValueError(
                f"bin_s: given {self.bin_s:g}; allowed: at least duration_s over {_MOST_BINS:,}, "
                f"{self.duration_s / _MOST_BINS:g}"
            )
        return self

    @property
    def span_s(self) -> float:
        """Seconds from the first request until all deadlines have passed."""
        return self.duration_s + 2 * self.slo_s

    @property
    def bin_width_s(self) -> float:
        """Of the counts over time."""
        return self.bin_s

    @property
    def profiles(self) -> tuple[LatencyProfile, LatencyProfile]:
        """Of the light model and of the heavy one."""
        return load_profile(self.light_profile), load_profile(self.heavy_profile)

    @property
    def gpus_by_type(self) -> dict[str, int]:
        """All are of one type."""
        return {DEVICE: self.num_gpus}

    def fleet(self) -> Fleet:
        """Pools and the service, from the profiles.

        Raises:
            ConfigError: a profile can't be read.
            ValueError: it lacks what a cascade needs, or the deadline is too short for one.
        """
        light, heavy = self.profiles
        pools = (self._pool("light", light), self._pool("heavy", heavy))
        discriminate = light.of("discriminate")
        if not discriminate or light.model == heavy.model:
            raise ValueError(
                f"light_profile: given {self.light_profile!r}; allowed: profiles with a row of "
                f"discriminate, of another model than {heavy.model}"
            )
        least_s = discriminate[0].seconds + sum(one.options[0].seconds for one in pools)
        if self.slo_s < least_s:
            raise ValueError(
                f"slo_s: given {self.slo_s:g}; allowed: at least {least_s:.2f}, for an image of "
                "each model and its confidence"
            )
        cascade = CascadeSpec(
            heavy.model,
            CASCADE_FID,
            CASCADE_DEFERRAL,
            discriminate[0].seconds,
            self.num_scorers,
        )
        service = ServiceSpec(SERVICE, light.model, self.slo_s, cascade)
        return Fleet((DeviceSpec(DEVICE, price=0),), pools, (service,))

    def _pool(self, name: str, profile: LatencyProfile) -> PoolSpec:
        try:
            options = image_options(profile, self.batching_gain)
        except ValueError as error:
            raise ValueError(f"{name}_profile: {error}") from None
        return PoolSpec(name, profile.model, DEVICE, options, load_s=self.load_s)

    def requests(self, seed: int) -> list[SimulatedRequest]:
        """The requests of a seed."""
        instants, confidences, coins = (np.random.default_rng([seed, n]) for n in range(3))
        curve = daily_rate(self.low_per_s, self.high_per_s, self.duration_s)
        arrivals = draw_arrivals(curve, instants, cv=self.cvs[seed % len(self.cvs)])
        uniform = confidences.random(len(arrivals))
        real = np.interp(uniform, CASCADE_DEFERRAL.rates, CASCADE_DEFERRAL.thresholds)
        real = real**self.confidence_power
        flips = coins.random(len(arrivals))
        return [
            SimulatedRequest(number, SERVICE, at_s, at_s + self.slo_s, confidence, coin)
            for number, (at_s, confidence, coin) in enumerate(
                zip(arrivals.tolist(), real.tolist(), flips.tolist(), strict=True)
            )
        ]

    def initial(self, planner: Planner[Any]) -> Plan:
        """Replicas for the peak by the published sums, or those of a plan that never changes."""
        if isinstance(planner, FixedPlanner):
            return planner.fixed
        num_light = max(1, round(self.num_gpus / 8))
        return Plan(
            (
                PoolPlan("light", num_light, max_batch=16),
                PoolPlan("heavy", self.num_gpus - num_light, max_batch=4),
            )
        )

    def figures_of(self, run: ControlRun) -> dict[str, float]:
        """See the class."""
        course = run.course
        shares = course.heavy_shares[course.answered > 0]
        # without answers, quality is that of the light model
        deferral = float(shares.mean()) if len(shares) else 0.0
        plan = run.rounds[-1].report.plan
        is_random = any(one.routing == "random" for one in plan.cascades)
        fid = _random_fid if is_random else CASCADE_FID.score_at
        num_kept = sum(one.kept for one in run.outcomes)
        num_on_time = sum(one.on_time for one in run.outcomes)
        return {
            "violations": 1 - num_on_time / max(1, len(run.requests)),
            "deferral": deferral,
            "fid": fid(deferral),
            "fid_over_time": float(np.mean([fid(share) for share in shares.tolist() or [0.0]])),
            "kept": num_kept / max(1, int(course.answered.sum())),
            "num_plan_changes": run.num_plan_changes,
            "num_requests": len(run.requests),
        }

    def panels(self, courses: Mapping[str, Course]) -> dict[str, dict[str, Line]]:
        """Requests of the first policy's run, and what became of them under each."""
        first = courses[self.policies[0]]
        return {
            "requests per second": {"requests": first.requests_per_s[SERVICE]},
            "deferred, %": {
                name: one.by_bin(100 * one.heavy_shares) for name, one in courses.items()
            },
            "violations, %": {
                name: one.by_bin(100 * one.missed_shares) for name, one in courses.items()
            },
            "images waiting": {name: one.waiting for name, one in courses.items()},
        }


def _random_fid(heavy_share: float) -> float:
    """Of images that are not chosen by confidence: on the line between the two models' own."""
    light, heavy = CASCADE_FID.score_at(0.0), CASCADE_FID.score_at(1.0)
    return light + heavy_share * (heavy - light)
