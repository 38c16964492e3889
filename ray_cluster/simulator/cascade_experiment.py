"""Experiment: a cascade on a few GPUs over a day, quality against violations.

DiffServe's setting (section 4.1): SD-Turbo and SD1.5 on 16 A100, a day of 4 to 32 requests per
second in 350 s, deadlines of 5 s. All policies see the same requests with the same confidences, and
are served by the same queues; refused, dropped and late requests are violations. Seconds are those
of published latency tables: every figure is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from ray_cluster.models.profiles import load_profile
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve
from ray_cluster.policies.fleet import CascadeSpec, DeviceSpec, Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.latency import LatencyProfile
from ray_cluster.policies.plan import Plan, PoolPlan, knobs_of
from ray_cluster.policies.planner import Planner
from ray_cluster.simulator.arrivals import daily_rate, draw_arrivals
from ray_cluster.simulator.batch_tables import image_options
from ray_cluster.simulator.cluster import SimulatedCluster
from ray_cluster.simulator.control_course import ControlResult, Course, course_of
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
from ray_cluster.simulator.outcomes import SimulatedOutcome

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


class CascadeExperiment(ControlExperiment):
    """What is simulated."""

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
        """Seconds from the first request until the last has ended."""
        return self.duration_s + 2 * self.slo_s

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
        return Fleet(
            (DeviceSpec(DEVICE, price=0),),
            pools,
            (ServiceSpec(SERVICE, light.model, self.slo_s, cascade),),
        )

    def _pool(self, name: str, profile: LatencyProfile) -> PoolSpec:
        try:
            options = image_options(profile, self.batching_gain)
        except ValueError as error:
            raise ValueError(f"{name}_profile: {error}") from None
        return PoolSpec(name, profile.model, DEVICE, options, load_s=self.load_s)

    def jobs(self, seed: int) -> list[SimulatedRequest]:
        """The requests of a seed."""
        instants, confidences, coins = (np.random.default_rng([seed, n]) for n in range(3))
        curve = daily_rate(self.low_per_s, self.high_per_s, self.duration_s)
        arrivals = draw_arrivals(curve, instants, cv=self.cvs[seed % len(self.cvs)])
        uniform = confidences.random(len(arrivals))
        seen = np.interp(uniform, CASCADE_DEFERRAL.rates, CASCADE_DEFERRAL.thresholds)
        seen = seen**self.confidence_power
        flips = coins.random(len(arrivals))
        return [
            SimulatedRequest(number, SERVICE, at_s, at_s + self.slo_s, confidence, coin)
            for number, (at_s, confidence, coin) in enumerate(
                zip(arrivals.tolist(), seen.tolist(), flips.tolist(), strict=True)
            )
        ]


@dataclass(frozen=True, slots=True)
class CascadeRow:
    """One policy on one seed.

    Attributes:
        violations: share of the requests that were dropped or late.
        deferral: time mean of the share of answers that are the heavy model's.
        fid: of the table at that mean; for random routing, on the line between its ends.
        fid_over_time: mean of the table's values at the share of every bin.
        kept: share of the answers that are light for want of time, not by confidence.
        num_plan_changes: rounds that started or stopped replicas.
    """

    policy: str
    seed: int
    violations: float
    deferral: float
    fid: float
    fid_over_time: float
    kept: float
    num_plan_changes: int
    num_requests: int


def run_cascade(
    experiment: CascadeExperiment,
    policy: str,
    planner: Planner[Any],
    seed: int,
    initial: Plan,
) -> ControlResult[CascadeRow]:
    """Simulate one policy on one seed, from replicas that are loaded already."""
    events = EventQueue()
    fleet = experiment.fleet()
    cluster = SimulatedCluster(
        events,
        fleet,
        {DEVICE: experiment.num_gpus},
        np.random.default_rng([seed, 3]),
        noise_cv=experiment.noise_cv,
    )
    for pool in initial.pools:
        cluster.scale(pool.pool, pool.num_replicas)
    cluster.turn(knobs_of(initial))
    # a load, however noisy, is over by then
    begin_s = 3 * experiment.load_s
    events.run(begin_s)
    jobs = experiment.jobs(seed)
    rounds = run_controlled(
        events,
        cluster,
        planner,
        jobs,
        initial=initial,
        period_s=experiment.period_s,
        span_s=experiment.span_s,
    )
    cluster.run_out()
    # what nobody serves to the end is late as well
    assert len(jobs) - len(cluster.outcomes) == cluster.num_running
    course = course_of(jobs, cluster.outcomes, rounds, begin_s=begin_s, bin_s=experiment.bin_s)
    return ControlResult(_row(policy, seed, cluster.outcomes, rounds, course), course)


def _row(
    policy: str,
    seed: int,
    outcomes: Sequence[SimulatedOutcome],
    rounds: Sequence[Round],
    course: Course,
) -> CascadeRow:
    shares = course.heavy_shares[course.answered > 0]
    # nobody was answered: no better than if all were light
    deferral = float(shares.mean()) if len(shares) else 0.0
    is_random = any(one.routing == "random" for one in rounds[-1].report.plan.cascades)
    fid = _random_fid if is_random else CASCADE_FID.score_at
    num_requests = sum(int(counts.sum()) for _, counts in course.arrived)
    return CascadeRow(
        policy=policy,
        seed=seed,
        violations=1 - sum(one.on_time for one in outcomes) / max(1, num_requests),
        deferral=deferral,
        fid=fid(deferral),
        fid_over_time=float(np.mean([fid(share) for share in shares.tolist() or [0.0]])),
        kept=sum(one.kept for one in outcomes) / max(1, int(course.answered.sum())),
        num_plan_changes=num_plan_changes(rounds),
        num_requests=num_requests,
    )


def _random_fid(heavy_share: float) -> float:
    """Of images that are not chosen by confidence: on the line between the two models' own."""
    light, heavy = CASCADE_FID.score_at(0.0), CASCADE_FID.score_at(1.0)
    return light + heavy_share * (heavy - light)


def two_pools(num_light: int, num_heavy: int, *, light_batch: int, heavy_batch: int) -> Plan:
    """Return a plan of replicas without a cascade, to begin with."""
    return Plan(
        (PoolPlan("light", num_light, light_batch), PoolPlan("heavy", num_heavy, heavy_batch))
    )
