"""Experiment files of the kind ``cascade``: a light model before a heavy one, over a day.

Without further keys DiffServe's setting (section 4.1): SD-Turbo and SD1.5 on 16 A100, a day of 4 to
32 requests per second in 350 s, deadlines of 5 s. Dropped and late requests are violations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from ray_cluster.models.cascade_curves import CascadeCurves, load_curves
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.baselines.fixed_cascades import FixedPlanner
from ray_cluster.policies.costs.latency import LatencyProfile
from ray_cluster.policies.planning.fleet import (
    CascadeSpec,
    DeviceSpec,
    Fleet,
    PoolSpec,
    ServiceSpec,
)
from ray_cluster.policies.planning.plan import Plan, PoolPlan
from ray_cluster.policies.planning.planner import Planner
from ray_cluster.simulator.arrivals import Floats, daily_rate, draw_arrivals
from ray_cluster.simulator.cascade.policies import CASCADE_POLICIES
from ray_cluster.simulator.control.cluster import STEPS, options_of, whole_image
from ray_cluster.simulator.control.course import Course
from ray_cluster.simulator.control.experiment import (
    Column,
    ControlExperiment,
    ControlRun,
    GapCv,
    LoadSeconds,
    PeriodSeconds,
    Rate,
    Seconds,
    Setting,
    check_day,
)
from ray_cluster.simulator.experiment import IN_TRACE, MOST_REQUESTS
from ray_cluster.simulator.reports import Line
from ray_cluster.simulator.traces import read_instants
from ray_cluster.simulator.workload import Arrival

SERVICE = "images"
_MOST_BINS = 100_000
# of a replayed trace, of which the busiest counts as its peak: hours of a day
_NUM_PARTS = 24
_VIOLATIONS = Column("violations", "violations, %", 100, 2)
_COURSE = (
    *(Column("deferral", "deferred, %", 100), Column("kept", "kept, %", 100, 2)),
    Column("num_plan_changes", "changes"),
)
# what else rows have, beside the quality
_TAKEN = (*(one.key for one in (_VIOLATIONS, *_COURSE)), "num_requests", "policy", "settings")
# drawn instead of replayed
_OF_DAYS = ("low_per_s", "high_per_s", "duration_s", "cvs")


@dataclass(frozen=True)
class CascadeFiles:
    """What an experiment names.

    Attributes:
        instants_s: of a trace's arrivals, rising from 0; None where they are drawn.
    """

    light: LatencyProfile
    heavy: LatencyProfile
    curves: CascadeCurves
    instants_s: Floats | None

    @property
    def quality(self) -> Column:
        """The quality, by its name; with as many decimals as its scores differ in."""
        scores = self.curves.quality.scores
        spread = max(scores) - min(scores)
        digits = 2 - min(0, math.floor(math.log10(spread))) if spread else 2
        name = self.curves.quality_name
        return Column(re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_"), name, 1, digits)

    def score(self, deferral_rate: float, *, is_random: bool) -> float:
        """Return the quality of all images at a share of the heavy model.

        Args:
            is_random: whether images are deferred by chance: on the line between the two models.
        """
        curve = self.curves.quality
        if not is_random:
            return curve.score_at(deferral_rate)
        light, heavy = curve.score_at(0.0), curve.score_at(1.0)
        return light + deferral_rate * (heavy - light)


class CascadeExperiment(ControlExperiment):
    """What is simulated.

    Its figures are `violations` (share of the requests that were dropped or late), `deferral` (time
    mean of the heavy model's share of the answers), the quality by its name, such as `fid` (of the
    curve at that mean; for random routing, on the line between its ends), the same over time (mean
    of the curve's values at every bin's share), `kept` (share of the answers that are light for
    want of time) and `num_plan_changes` (rounds that started or stopped replicas).
    """

    POLICIES = CASCADE_POLICIES
    TRADE_OFF: ClassVar[tuple[str, str]] = ("quality", "quality against violations")
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
    curves: str = Field(
        "diffserve-1", min_length=1, description="deferral and quality, by their name or file"
    )
    trace: str | None = Field(None, min_length=1, description="beside the file: replayed instead")
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
        if self.trace is not None:
            self._refuse(_OF_DAYS, IN_TRACE)
            return self
        check_day(self.low_per_s, self.high_per_s, self.duration_s)
        self._check_length()
        return self

    def _check_length(self) -> None:
        if self.arrivals_span_s > _MOST_BINS * self.bin_s:
            raise ValueError(
                f"bin_s: given {self.bin_s:g}; allowed: at least the seconds of arrivals over "
                f"{_MOST_BINS:,}, {self.arrivals_span_s / _MOST_BINS:g}"
            )
        self.check_rounds()

    def located(self, folder: Path) -> Self:
        """Return the experiment of a file in the folder; reads a trace, to know how long it is.

        Raises:
            ConfigError: a file can't be read.
            ValueError: the trace is too long.
        """
        located = super().located(folder)
        located.__dict__.pop("files", None)
        if located.trace is not None:
            located._check_length()
        return located

    @cached_property
    def files(self) -> CascadeFiles:
        """What it names, read once; relative paths lie in the file's folder.

        Raises:
            ConfigError: a file can't be read, or says something that is not allowed.
            ValueError: a trace has too many requests.
        """
        instants_s = None
        if self.trace is not None:
            instants_s = np.array(read_instants(self._folder / self.trace))
            if len(instants_s) > MOST_REQUESTS:
                raise ValueError(
                    f"trace: given {self.trace} with {len(instants_s):,} requests; allowed: at "
                    f"most {MOST_REQUESTS:,}"
                )
        light, heavy = (
            load_profile(one, self._folder) for one in (self.light_profile, self.heavy_profile)
        )
        return CascadeFiles(light, heavy, load_curves(self.curves, self._folder), instants_s)

    @property
    def arrivals_span_s(self) -> float:
        return self.duration_s if self.trace is None else float(self._replayed_s[-1])

    @property
    def peak_per_s(self) -> float:
        """The highest rate: by day, or in the busiest 24th of a trace."""
        if self.trace is None:
            return self.high_per_s
        part_s = max(self.bin_s, self.arrivals_span_s / _NUM_PARTS)
        return int(np.bincount((self._replayed_s // part_s).astype(int)).max()) / part_s

    @property
    def mean_per_s(self) -> float:
        if self.trace is None:
            return (self.low_per_s + self.high_per_s) / 2
        return len(self._replayed_s) / max(self.bin_s, self.arrivals_span_s)

    @property
    def _replayed_s(self) -> Floats:
        assert self.files.instants_s is not None, "there is no trace"
        return self.files.instants_s

    @property
    def span_s(self) -> float:
        return self.arrivals_span_s + 2 * self.slo_s

    @property
    def bin_width_s(self) -> float:
        return self.bin_s

    def setting(self) -> Setting:
        """Read the files; errors as of :meth:`ControlExperiment.setting`."""
        fleet, files = self._fleet(), self.files
        one, curves = files.quality, files.curves
        over_time = one._replace(key=f"{one.key}_over_time", title=f"{one.title} over time")
        better = "lower" if curves.quality.lower_is_better else "higher"
        words = (
            f"Dropped and late requests are violations. {one.title} ({better} is better) is that "
            f"of the curves {self.curves} at the mean deferral, {one.title} over time the mean of "
            "their values at the deferrals of every bin. Kept are light answers that should have "
            "been deferred: below the plan's threshold, for allocation below that of idle heavy "
            "models, too; changes are rounds that start or stop replicas."
        )
        return Setting(
            fleet,
            (files.light, files.heavy),
            {files.light.device: self.num_gpus},
            (_VIOLATIONS, one, over_time, *_COURSE),
            words,
            (_VIOLATIONS, one._replace(title=f"{one.title}, {better} is better")),
        )

    def _fleet(self) -> Fleet:
        files = self.files
        light, heavy, curves, quality = files.light, files.heavy, files.curves, files.quality
        if quality.key in _TAKEN:
            raise ValueError(
                f"curves: given {quality.title!r} as the quality's name; allowed: any that does "
                f"not read like one of {', '.join(_TAKEN)}"
            )
        pools = (self._pool("light", light), self._pool("heavy", heavy))
        discriminate = light.of("discriminate")
        if not discriminate or light.model == heavy.model:
            raise ValueError(
                f"light_profile: given {self.light_profile!r}; allowed: profiles with a row of "
                f"discriminate, of another model than {heavy.model}"
            )
        score_s = discriminate[0].seconds
        least_s = score_s + sum(one.options[0].seconds for one in pools)
        if self.slo_s < least_s:
            raise ValueError(
                f"slo_s: given {self.slo_s:g}; allowed: at least {least_s:.2f}, for an image of "
                "each model and its confidence"
            )
        if light.device != heavy.device:
            raise ValueError(
                f"heavy_profile: given one of {heavy.device}; allowed: of {light.device}, as "
                "light_profile: all GPUs are of one type"
            )
        cascade = CascadeSpec(
            heavy.model, curves.quality, curves.deferral, score_s, self.num_scorers
        )
        service = ServiceSpec(SERVICE, light.model, self.slo_s, cascade)
        return Fleet((DeviceSpec(light.device, price=0),), pools, (service,))

    def _pool(self, name: str, profile: LatencyProfile) -> PoolSpec:
        try:
            options = options_of(profile, batching_gain=self.batching_gain)
        except ValueError as error:
            raise ValueError(f"{name}_profile: {error}") from None
        return PoolSpec(name, profile.model, profile.device, options, load_s=self.load_s)

    def requests(self, seed: int) -> list[Arrival]:
        instants, confidences, coins = (np.random.default_rng([seed, n]) for n in range(3))
        if self.trace is None:
            day = daily_rate(self.low_per_s, self.high_per_s, self.duration_s)
            arrivals = draw_arrivals(day, instants, cv=self.cvs[seed % len(self.cvs)])
        else:
            arrivals = self._replayed_s
        curve = self.files.curves.deferral
        real = np.interp(confidences.random(len(arrivals)), curve.rates, curve.thresholds)
        columns = (arrivals, real**self.confidence_power, coins.random(len(arrivals)))
        return [
            whole_image(
                at_s, SERVICE, self.slo_s, num_steps=STEPS, confidence=confidence, coin=coin
            )
            for at_s, confidence, coin in zip(*(one.tolist() for one in columns), strict=True)
        ]

    def initial(self, planner: Planner[Any]) -> Plan:
        """Replicas for the peak by the published sums, or those of a plan that never changes."""
        if isinstance(planner, FixedPlanner):
            return planner.fixed
        light, heavy = self._fleet().pools
        num_light = max(1, round(self.num_gpus / 8))
        return Plan(
            (
                PoolPlan("light", num_light, max_batch=self._first_batch(light, 16)),
                PoolPlan("heavy", self.num_gpus - num_light, max_batch=self._first_batch(heavy, 4)),
            )
        )

    def _first_batch(self, pool: PoolSpec, most: int) -> int:
        """The largest batch of the pool's table that is in time, up to the published one."""
        options = [one for one in pool.options if one.seconds <= self.slo_s]
        return max(one.batch for one in options if one.batch <= max(most, options[0].batch))

    def figures_of(self, run: ControlRun) -> dict[str, float]:
        course, key = run.course, self.files.quality.key
        shares = course.heavy_shares[course.answered > 0]
        # without answers, quality is that of the light model
        deferral = float(shares.mean()) if len(shares) else 0.0
        plan = run.rounds[-1].report.plan
        is_random = any(one.routing == "random" for one in plan.cascades)
        rates = (deferral, *(shares.tolist() or [0.0]))
        score, *scores = (self.files.score(one, is_random=is_random) for one in rates)
        num_on_time = sum(one.is_met for one in run.fates)
        num_kept = sum(one.is_kept for one in run.fates)
        return {
            "violations": 1 - num_on_time / max(1, len(run.requests)),
            "deferral": deferral,
            key: score,
            f"{key}_over_time": float(np.mean(scores)),
            "kept": num_kept / max(1, int(course.answered.sum())),
            "num_plan_changes": run.num_plan_changes,
            "num_requests": len(run.requests),
        }

    def panels(self, courses: Mapping[str, Course]) -> dict[str, dict[str, Line]]:
        """Requests of the first policy's run, and what became of them under each."""

        def each(line: Callable[[Course], Line]) -> dict[str, Line]:
            return {name: line(one) for name, one in courses.items()}

        requests = courses[self.policies[0]].requests_per_s[SERVICE]
        return {
            "requests per second": {"requests": requests},
            "deferred, %": each(lambda one: one.by_bin(100 * one.heavy_shares)),
            "violations, %": each(lambda one: one.by_bin(100 * one.missed_shares)),
            "images waiting": each(lambda one: one.waiting),
        }
