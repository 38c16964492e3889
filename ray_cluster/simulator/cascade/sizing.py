"""How many GPUs a cascade needs over a day: the fewest that keep deadlines and quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from ray_cluster.errors import ConfigError
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.control.course import Course
from ray_cluster.simulator.control.experiment import ControlRow, TunedSettings
from ray_cluster.simulator.control.report import control_parts
from ray_cluster.simulator.experiment import validated
from ray_cluster.simulator.reports import Table
from ray_cluster.simulator.results import Mean, mean_of
from ray_cluster.simulator.sizing import Plan, Run, fewest

Binds = Literal["throughput", "deadlines", "quality"]
"""What keeps a smaller number from being enough."""
_BINDS: Mapping[Binds, str] = {
    "throughput": "throughput: fewer could not make so many light images even if they never idled",
    "deadlines": "deadlines: with fewer too many requests would be late",
    "quality": "quality: with fewer requests would be in time, but images worse",
}


class CascadeSizingTask(CascadeExperiment):
    """What is wanted: keys of an experiment without its number of GPUs."""

    what: str = Field("How many GPUs a cascade needs.", min_length=1)
    policies: tuple[str, ...] = Field(("allocation",), min_length=1, max_length=1)
    first_seed: int = Field(0, ge=0)
    num_seeds: int = Field(3, ge=1, le=100)
    most_violations: float = Field(0.02, gt=0, lt=1, description="share that may be late")
    worst_quality: float | None = Field(
        None, allow_inf_nan=False, description="at the mean deferral; none bounds it"
    )
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
        """How many have the time that the light images of the wanted share take, and one more.

        One more, as there is a replica of each model.
        """
        light = self.fleet().pools[0]
        image_s = min(one.seconds / one.batch for one in light.options)
        return 1 + max(1, math.ceil((1 - self.most_violations) * self.mean_per_s * image_s))


@dataclass(frozen=True, slots=True)
class Tried:
    """What some GPUs attain.

    Attributes:
        at_peak: ready replicas by pool when most requests arrived, of the first seed.
    """

    violations: Mean
    quality: Mean
    at_peak: Mapping[str, int]

    def is_in_time(self, task: CascadeSizingTask) -> bool:
        """Whether few enough requests are late."""
        return self.violations.value <= task.most_violations

    def is_good(self, task: CascadeSizingTask) -> bool:
        """Whether images are good enough."""
        if task.worst_quality is None:
            return True
        if task.files.curves.quality.lower_is_better:
            return self.quality.value <= task.worst_quality
        return self.quality.value >= task.worst_quality


@dataclass(frozen=True, slots=True)
class CascadeSizing:
    """What a cascade would need.

    Attributes:
        least: GPUs below which no policy can do it.
        gpus: the fewest that were seen to do it; None where no number up to the most does.
        tried: what was simulated, by number of GPUs.
    """

    least: int
    gpus: int | None
    binds: Binds
    tried: dict[int, Tried]

    @property
    def shown(self) -> Tried | None:
        """What the GPUs that are enough attain, or the most that were tried."""
        if not self.tried:
            return None
        return self.tried[max(self.tried) if self.gpus is None else self.gpus]


def size_cascade(
    task: CascadeSizingTask, tuned: Sequence[TunedSettings], run: Run
) -> CascadeSizing:
    """Find the fewest GPUs that keep deadlines and quality.

    More GPUs are assumed to attain more, on the same requests.
    """
    tried: dict[int, Tried] = {}

    def enough(num_gpus: int) -> bool:
        parts = control_parts(task.with_gpus(num_gpus), tuned)
        rows: Sequence[ControlRow] = run(parts, f"{num_gpus} GPUs")
        tried[num_gpus] = Tried(
            mean_of([one.figures["violations"] for one in rows]),
            mean_of([one.figures[task.files.quality.key] for one in rows]),
            _at_peak(next(one.course for one in rows if one.course is not None)),
        )
        return tried[num_gpus].is_in_time(task) and tried[num_gpus].is_good(task)

    least = task.least_gpus
    found = fewest(least, task.most_gpus, enough) if least <= task.most_gpus else None
    below = max(tried, default=0) if found is None else found - 1
    binds: Binds = "throughput"
    if below in tried:
        binds = "quality" if tried[below].is_in_time(task) else "deadlines"
    return CascadeSizing(least, found, binds, tried)


def _at_peak(course: Course) -> dict[str, int]:
    """Ready replicas by pool in the round after the bin in which most requests arrived."""
    totals = [sum(counts) for counts in zip(*course.arrived.values(), strict=True)]
    peak_s = course.bin_s * (totals.index(max(totals)) + 1)
    state = next((one for one in course.states if one.now_s >= peak_s), course.states[-1])
    return {one.pool: one.num_ready for one in state.pools}


def plan_cascade(content: Mapping[str, Any], path: Path, run: Run) -> Plan:
    """Size the cascade of a file.

    Raises:
        ConfigError: the file says what is not allowed, or names a file that can't be used.
    """
    task = validated(CascadeSizingTask, content, f"task {path}")
    try:
        task = task.located(path.parent)
        tuned = task.with_gpus(task.most_gpus).tuned()
    except ValueError as error:
        raise ConfigError(f"the task {path}: {error}") from None
    sizing = size_cascade(task, tuned, run)
    shown = sizing.shown
    at_peak = {} if shown is None else shown.at_peak
    tried = dict(sorted(sizing.tried.items()))
    quality = task.files.quality
    notes = "; ".join(
        f"{gpus}: {one.violations.as_points()} % late, {quality.title} "
        f"{one.quality.value:.{quality.digits}f}"
        for gpus, one in tried.items()
    )
    figures = {
        "simulated": True,
        "task": task.model_dump(mode="json"),
        "gpus": sizing.gpus,
        "least": sizing.least,
        "at_peak": dict(at_peak),
        "binds": sizing.binds,
        "tried": {
            str(gpus): {
                "violations": one.violations.as_figures(),
                quality.key: one.quality.as_figures(),
            }
            for gpus, one in tried.items()
        },
    }
    row = [
        f"more than {task.most_gpus}"
        if sizing.gpus is None
        else f"{sizing.gpus} (at least {sizing.least})",
        "" if shown is None else shown.violations.as_points(),
        "" if shown is None else f"{shown.quality.value:.{quality.digits}f}",
        ", ".join(f"{number} {pool}" for pool, number in at_peak.items()),
        _BINDS[sizing.binds],
    ]
    columns = ["GPUs", "late, %", quality.title, "at the peak", "what binds"]
    note = f"GPUs and what they attain (simulated): {notes}"
    return Plan(Table(_title(task), columns, [row]), [note], figures)


def _title(task: CascadeSizingTask) -> str:
    wanted = f"at most {task.most_violations:.1%} late"
    if task.worst_quality is not None:
        bound = "most" if task.files.curves.quality.lower_is_better else "least"
        wanted += f", {task.files.quality.title} at {bound} {task.worst_quality:g}"
    rates = f"{task.low_per_s:g} to {task.high_per_s:g}"
    if task.trace is not None:
        rates = f"{task.mean_per_s:.3g} on average of {task.trace}"
    kinds = ", ".join(dict.fromkeys(kind for one in task.profiles for kind in one.kinds))
    return (
        f"{task.name}: {rates} requests a second within {task.slo_s:g} s, {wanted}, policy "
        f"{task.policies[0]} (simulated, {kinds} times)"
    )
