"""How many GPUs a cascade needs over a day: the fewest that keep deadlines and quality.

The simulation says it, with the control loop and the dispatcher that it plans for; throughput only
says where to begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from ray_cluster.simulator.cascade_experiment import CascadeExperiment, CascadeRow
from ray_cluster.simulator.control_course import ControlResult, Course
from ray_cluster.simulator.intervals import Mean, mean_of
from ray_cluster.simulator.sizing import fewest

Binds = Literal["throughput", "deadlines", "quality"]
"""What keeps a smaller number from being enough: GPUs that never idle would not do; too many
requests would be late; or they would be in time, but with worse images."""

Evaluate = Callable[[CascadeExperiment], Sequence[ControlResult[CascadeRow]]]
"""Runs an experiment's only policy with all its seeds."""


class CascadeSizingTask(CascadeExperiment):
    """What is wanted: keys of an experiment without its number of GPUs."""

    what: str = Field("How many GPUs a cascade needs.", min_length=1)
    policies: tuple[str, ...] = Field(("allocation",), min_length=1, max_length=1)
    first_seed: int = Field(0, ge=0)
    num_seeds: int = Field(3, ge=1, le=100)
    most_violations: float = Field(0.02, gt=0, lt=1, description="share that may be late")
    most_fid: float | None = Field(None, gt=0, description="at the mean deferral; none bounds it")
    most_gpus: int = Field(128, ge=2, le=1024, description="where to stop")

    @model_validator(mode="before")
    @classmethod
    def _check_open(cls, content: Any) -> Any:
        if isinstance(content, dict) and "num_gpus" in content:
            raise ValueError(
                f"num_gpus is what is looked for; given {content['num_gpus']!r:.40}: leave it out, "
                "and say with most_gpus where to stop"
            )
        return content

    def with_gpus(self, num_gpus: int) -> CascadeExperiment:
        """Return the simulation of so many."""
        return self.model_copy(update={"num_gpus": num_gpus})

    @property
    def least_gpus(self) -> int:
        """How many have the seconds that the light images of the wanted share take, and one more.

        One more, as there is a replica of each model.
        """
        light = self.fleet().pools[0]
        image_s = min(one.seconds / one.batch for one in light.options)
        mean_per_s = (self.low_per_s + self.high_per_s) / 2
        return 1 + max(1, math.ceil((1 - self.most_violations) * mean_per_s * image_s))


@dataclass(frozen=True, slots=True)
class Tried:
    """What some GPUs attain."""

    violations: Mean
    fid: Mean


@dataclass(frozen=True, slots=True)
class CascadeSizing:
    """What a cascade would need.

    Attributes:
        least: GPUs below which no policy can do it.
        gpus: the fewest that were seen to do it; None where no number up to the most does.
        tried: GPUs that were simulated, with what they attained.
        at_peak: ready replicas by pool, when most requests came, of the first seed.
    """

    least: int
    gpus: int | None
    binds: Binds
    tried: dict[int, Tried]
    at_peak: tuple[tuple[str, int], ...]

    @property
    def shown(self) -> Tried | None:
        """What the GPUs that are enough attain, or the most that were tried."""
        if not self.tried:
            return None
        return self.tried[max(self.tried) if self.gpus is None else self.gpus]


def size_cascade(task: CascadeSizingTask, evaluate: Evaluate) -> CascadeSizing:
    """Find the fewest GPUs that keep deadlines and quality.

    More GPUs are taken to attain more, on the same requests.
    """
    tried: dict[int, Tried] = {}
    peaks: dict[int, tuple[tuple[str, int], ...]] = {}

    def enough(num_gpus: int) -> bool:
        runs = evaluate(task.with_gpus(num_gpus))
        rows = [one.row for one in runs]
        tried[num_gpus] = Tried(
            mean_of([one.violations for one in rows]), mean_of([one.fid for one in rows])
        )
        peaks[num_gpus] = _at_peak(next(one.course for one in runs if one.course is not None))
        return _in_time(task, tried[num_gpus]) and _is_good(task, tried[num_gpus])

    least = task.least_gpus
    found = fewest(least, task.most_gpus, enough) if least <= task.most_gpus else None
    below = max(tried, default=0) if found is None else found - 1
    binds: Binds = "throughput"
    if below in tried:
        binds = "quality" if _in_time(task, tried[below]) else "deadlines"
    return CascadeSizing(least, found, binds, tried, peaks.get(found or below, ()))


def _in_time(task: CascadeSizingTask, tried: Tried) -> bool:
    return tried.violations.value <= task.most_violations


def _is_good(task: CascadeSizingTask, tried: Tried) -> bool:
    return task.most_fid is None or tried.fid.value <= task.most_fid


def _at_peak(course: Course) -> tuple[tuple[str, int], ...]:
    """Ready replicas by pool in the round after the bin in which most requests came."""
    totals = [sum(rates) for rates in zip(*course.per_s.values(), strict=True)]
    peak_s = course.bin_s * (totals.index(max(totals)) + 1)
    state = next((one for one in course.states if one.now_s >= peak_s), course.states[-1])
    return tuple((one.pool, one.num_ready) for one in state.pools)
