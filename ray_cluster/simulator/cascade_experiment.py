"""Experiment: a cascade on a few GPUs over a day, quality against violations.

DiffServe's setting (section 4.1): SD-Turbo and SD1.5 on 16 A100, a day of 4 to 32 requests per
second in 350 s, deadlines of 5 s. All policies see the same requests with the same confidences, and
are served by the same queues; refused, dropped and late requests are violations. Seconds are those
of published latency tables: every figure is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ray_cluster.control_loop import RoundReport
from ray_cluster.policies.allocation_problem import BatchOption
from ray_cluster.policies.cascade_curves import DeferralCurve, QualityCurve
from ray_cluster.policies.fleet import CascadeSpec, DeviceSpec, Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.latency import LatencyProfile
from ray_cluster.policies.plan import Plan, PoolPlan, knobs_of
from ray_cluster.policies.planner import Planner
from ray_cluster.profiles.files import load_profile
from ray_cluster.simulator.arrivals import daily_rate, draw_arrivals
from ray_cluster.simulator.cluster import SimulatedCluster
from ray_cluster.simulator.controlled import run_controlled
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.jobs import Job
from ray_cluster.simulator.outcomes import Outcome

SERVICE = "images"
DEVICE = "A100"
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


@dataclass(frozen=True, slots=True)
class CascadeExperiment:
    """What is simulated.

    Attributes:
        cvs: of arrivals' gaps; a seed takes the one at its remainder.
        batching_gain: factor on what a batch saves against its images one by one; 1 is the table.
        bin_s: of the time means.
        confidence_power: real confidences are the curve's to this power; 1 is the curve, above it
            prompts are harder than was known beforehand.
    """

    num_gpus: int = 16
    low_per_s: float = 4.0
    high_per_s: float = 32.0
    duration_s: float = 350.0
    cvs: tuple[float, ...] = (1.1, 1.3, 1.5)
    slo_s: float = 5.0
    period_s: float = 2.0
    load_s: float = 0.0
    noise_cv: float = 0.03
    batching_gain: float = 1.0
    light_profile: str = "sd-turbo-a100"
    heavy_profile: str = "sd15-a100"
    bin_s: float = 5.0
    confidence_power: float = 1.0

    def fleet(self) -> Fleet:
        """Pools and the service, from the profiles."""
        light, heavy = load_profile(self.light_profile), load_profile(self.heavy_profile)
        cascade = CascadeSpec(
            heavy.model, CASCADE_FID, CASCADE_DEFERRAL, light.of("discriminate")[0].seconds
        )
        return Fleet(
            (DeviceSpec(DEVICE, price=0),),
            (self._pool("light", light), self._pool("heavy", heavy)),
            (ServiceSpec(SERVICE, light.model, self.slo_s, cascade),),
        )

    def _pool(self, name: str, profile: LatencyProfile) -> PoolSpec:
        options = batch_options(profile, self.batching_gain)
        return PoolSpec(name, profile.model, DEVICE, options, load_s=self.load_s)

    def jobs(self, seed: int) -> list[Job]:
        """The requests of a seed."""
        instants, confidences, coins = (np.random.default_rng([seed, n]) for n in range(3))
        curve = daily_rate(self.low_per_s, self.high_per_s, self.duration_s)
        arrivals = draw_arrivals(curve, instants, cv=self.cvs[seed % len(self.cvs)])
        uniform = confidences.random(len(arrivals))
        seen = np.interp(uniform, CASCADE_DEFERRAL.rates, CASCADE_DEFERRAL.thresholds)
        seen = seen**self.confidence_power
        flips = coins.random(len(arrivals))
        return [
            Job(number, SERVICE, at_s, at_s + self.slo_s, confidence, coin)
            for number, (at_s, confidence, coin) in enumerate(
                zip(arrivals.tolist(), seen.tolist(), flips.tolist(), strict=True)
            )
        ]


def batch_options(profile: LatencyProfile, batching_gain: float = 1.0) -> tuple[BatchOption, ...]:
    """Return the batches of a table of whole images.

    What a batch saves against as many single images is multiplied by the gain, but never so that
    larger batches end sooner.
    """
    rows = sorted(profile.of("image"), key=lambda row: row.key.batch)
    single_s, options = rows[0].seconds, list[BatchOption]()
    for row in rows:
        alone_s = row.key.batch * single_s
        seconds = alone_s - batching_gain * (alone_s - row.seconds)
        least_s = options[-1].seconds if options else 0.0
        options.append(BatchOption(row.key.batch, max(seconds, least_s)))
    return tuple(options)


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
) -> CascadeRow:
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
    reports = run_controlled(
        events,
        cluster,
        planner,
        jobs,
        initial=initial,
        period_s=experiment.period_s,
        span_s=experiment.duration_s + 2 * experiment.slo_s,
    )
    cluster.run_out()
    # what nobody serves to the end is late as well
    num_unfinished = len(jobs) - len(cluster.outcomes)
    assert num_unfinished == cluster.num_running
    row = _row(experiment, policy, seed, cluster.outcomes, reports, begin_s)
    num_missed = sum(not one.on_time for one in cluster.outcomes) + num_unfinished
    return replace(row, violations=num_missed / len(jobs), num_requests=len(jobs))


def _row(
    experiment: CascadeExperiment,
    policy: str,
    seed: int,
    outcomes: Sequence[Outcome],
    reports: Sequence[RoundReport],
    begin_s: float,
) -> CascadeRow:
    """All but what is missed."""
    answered = [one for one in outcomes if one.answer != "dropped"]
    bins = np.array([(one.arrival_s - begin_s) // experiment.bin_s for one in answered], dtype=int)
    is_heavy = np.array([one.answer == "heavy" for one in answered], dtype=float)
    counts = np.bincount(bins)
    shares = np.bincount(bins, weights=is_heavy)[counts > 0] / counts[counts > 0]
    is_random = any(one.routing == "random" for one in reports[-1].plan.cascades)
    fid = _random_fid if is_random else CASCADE_FID.score_at
    return CascadeRow(
        policy=policy,
        seed=seed,
        violations=0.0,
        deferral=float(shares.mean()),
        fid=fid(float(shares.mean())),
        fid_over_time=float(np.mean([fid(share) for share in shares.tolist()])),
        kept=sum(one.kept for one in answered) / len(answered),
        num_plan_changes=sum(bool(one.actions and one.actions.scales) for one in reports),
        num_requests=0,
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
