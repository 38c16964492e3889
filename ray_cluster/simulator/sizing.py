"""How many replicas or GPUs a workload needs: a bound from costs, and simulations above it.

The bound is what cannot be enough, whatever the policy; simulations find what is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError
from ray_cluster.policies.costs.cost_model import share_cost, step_s, work_of
from ray_cluster.policies.types import RequestView
from ray_cluster.simulator.cascade.experiment import CascadeExperiment
from ray_cluster.simulator.cell.experiment import (
    CellExperiment,
    Positive,
    Requests,
    check_length,
    check_policy,
)
from ray_cluster.simulator.cell.runs import Setting, run_cell
from ray_cluster.simulator.cell.workload import example_of
from ray_cluster.simulator.control.course import Course
from ray_cluster.simulator.control.experiment import ControlRow, TunedSettings
from ray_cluster.simulator.control.report import control_parts
from ray_cluster.simulator.controlnets.sizing import plan_controlnets
from ray_cluster.simulator.experiment import Name, validated
from ray_cluster.simulator.reports import Plan, Table
from ray_cluster.simulator.results import Mean, Row, mean_of

_HERE = Path()
_ROUNDING = 1e-9
_T = TypeVar("_T")

Binds = Literal["latency", "throughput", "bursts", "batches", "peaks", "deadlines", "quality"]
"""What keeps a smaller number from being enough."""
_BINDS: Mapping[Binds, str] = {
    "latency": "latency: an image alone takes longer than its deadline allows",
    "throughput": "throughput: fewer could not make so many even in batches that are always full",
    "bursts": "bursts: most beyond full batches would go if requests came evenly",
    "batches": "batches: most beyond full batches is for batches that this policy does not fill",
    "peaks": "peaks: fewer would do if the trace were even and filled all batches",
    "deadlines": "deadlines: with fewer too many requests would be late",
    "quality": "quality: with fewer requests would be in time, but images worse",
}
_LIGHT = "throughput: fewer could not make so many light images even if they never idled"

Run = Callable[[Sequence[Callable[[], Any]], str], Sequence[Any]]
"""Calls functions, in other processes or not, and returns their results; also gets a label."""


def plan_task(content: Mapping[str, Any], path: Path, run: Run) -> Plan:
    """Size the task of a file.

    Raises:
        ConfigError: the file says what is not allowed, or names a file that can't be used.
    """
    kind = content.get("kind")
    if kind == "controlnets":
        return plan_controlnets(content, path)
    return (plan_cascade if kind == "cascade" else plan_cell)(content, path, run)


@dataclass(frozen=True, slots=True)
class Search(Generic[_T]):
    """The fewest of something that were seen to be enough.

    Attributes:
        least: below which no policy can do it; 0 where no number can.
        found: the fewest; None where no number up to the most does.
        tried: what those attain that were simulated, by number.
    """

    least: int
    found: int | None
    binds: Binds
    tried: Mapping[int, _T]

    @property
    def shown(self) -> _T | None:
        """What the number that is enough attains, or the most that was tried."""
        if not self.tried:
            return None
        return self.tried[max(self.tried) if self.found is None else self.found]


def fewest(low: int, most: int, enough: Callable[[int], bool]) -> int | None:
    """Return the least number from low to most that is enough, if more always is.

    By steps that double, then halves: the number below it has been tried, or is below `low`.
    """
    step, high, below = 1, low, low - 1
    while not enough(high):
        if high == most:
            return None
        below, high, step = high, min(most, high + step), 2 * step
    while high - below > 1:
        middle = (below + high) // 2
        if enough(middle):
            high = middle
        else:
            below = middle
    return high


# cells


class Device(BaseModel):
    """A kind of device that replicas can be on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = Field(description="a latency profile, by its name or path")
    max_batch: int = Field(12, ge=1, le=1024)
    price_per_hour: float = Field(0.0, ge=0, allow_inf_nan=False, description="of one replica")


class SizingTask(Requests):
    """What is wanted of a cell."""

    name: Name
    devices: tuple[Device, ...] = Field(min_length=1)
    rate_per_s: Positive | None = Field(None, le=1e6, description="at the peak")
    speed: Positive = Field(1.0, description="of the replay")
    policy: str = Field("deadline", description="of a cell; what the service does")
    attainment: float = Field(0.99, gt=0, lt=1, description="share that must be done in time")
    most_replicas: int = Field(1024, ge=1, le=4096)
    first_seed: int = Field(0, ge=0)
    num_seeds: int = Field(5, ge=1, le=100)

    @model_validator(mode="after")
    def _check(self) -> SizingTask:
        check_policy(self.policy)
        misplaced, why = {"speed"}, "without a trace"
        if self.trace is not None:
            misplaced, why = {"rate_per_s", "cv"}, "with a trace, which says that itself"
        for name in sorted(misplaced & self.model_fields_set):
            raise ValueError(f"{name}: given {getattr(self, name)!r:.60}; not allowed {why}")
        if self.trace is None:
            if not self.sizes or self.rate_per_s is None or self.slo_s is None:
                raise ValueError("sizes, rate_per_s and slo_s are needed, or a trace")
            check_length(self.rate_per_s, self.duration_s)
        return self

    @property
    def load(self) -> float:
        """The only one that is simulated: a rate per second, or the speed of a replay."""
        return self.speed if self.rate_per_s is None else self.rate_per_s

    def experiment(self, device: Device, replicas: int, *, is_even: bool = False) -> CellExperiment:
        """The simulation of so many replicas, with the task's arrivals or evenly spaced ones."""
        content = self.model_dump(include=self.model_fields_set & Requests.model_fields.keys())
        content |= device.model_dump(include={"profile", "max_batch"})
        content |= self.model_dump(include={"name", "first_seed", "num_seeds"})
        content |= {"kind": "cell", "what": f"{replicas} replicas", "replicas": replicas}
        content |= {"policies": (self.policy,)}
        if self.trace is None:
            content |= {"rates_per_s": (self.rate_per_s,), "cv": 0.0 if is_even else self.cv}
        else:
            content |= {"speeds": (self.speed,)}
        return CellExperiment.model_validate(content)


@dataclass(frozen=True, slots=True)
class Sizing(Search[Mean]):
    """What a device would need; `tried` holds shares in time.

    Attributes:
        kinds: of the profile's figures.
        evenly: the fewest that do it if requests come in even gaps; None where no number up to the
            most does, nothing was simulated, or a trace is replayed.
    """

    device: Device
    kinds: tuple[str, ...]
    evenly: int | None = None

    @property
    def per_hour(self) -> float | None:
        """The price of the replicas; None without one."""
        price = self.device.price_per_hour
        return self.found * price if self.found is not None and price else None


def size_device(task: SizingTask, device: Device, run: Run, folder: Path = _HERE) -> Sizing:
    """Find the fewest replicas of a device that attain what is wanted.

    More replicas are assumed to attain more, on the same arrivals. A trace is in the folder.

    Raises:
        ConfigError: the profile or the trace can't be used.
    """
    try:
        setting = Setting.of(task.experiment(device, 1), folder)
    except ValidationError as error:
        raise ConfigError(describe(error, CellExperiment)) from None
    except ValueError as error:
        raise ConfigError(f"{device.profile}: {error}") from None
    if _share_late_alone(task, setting) > 1 - task.attainment:
        return Sizing(0, None, "latency", {}, device, setting.kinds)
    least = least_replicas(task, setting)
    if least > task.most_replicas:
        return Sizing(least, None, "throughput", {}, device, setting.kinds)
    tried: dict[int, Mean] = {}

    def attained_by(replicas: int, *, is_even: bool = False) -> Mean:
        experiment = task.experiment(device, replicas, is_even=is_even)
        parts = [partial(run_cell, experiment, one, folder) for one in experiment.runs()]
        rows: Sequence[Row] = run(parts, f"{replicas} x {device.profile}")
        return mean_of([row.figures["attainment"] for row in rows])

    def enough(replicas: int) -> bool:
        tried[replicas] = attained_by(replicas)
        return tried[replicas].value >= task.attainment

    def enough_evenly(replicas: int) -> bool:
        return attained_by(replicas, is_even=True).value >= task.attainment

    found, evenly = fewest(least, task.most_replicas, enough), None
    if task.trace is None:
        most = task.most_replicas if found is None else found
        evenly = least if found == least else fewest(least, most, enough_evenly)
    binds = _what_binds(least, evenly, found) if task.trace is None else "peaks"
    if found == least:
        binds = "throughput"
    return Sizing(least, found, binds, dict(sorted(tried.items())), device, setting.kinds, evenly)


def _what_binds(least: int, evenly: int | None, found: int | None) -> Binds:
    """What most of the replicas beyond the least are for."""
    if evenly is None:
        return "batches"
    return "bursts" if found is None or found - evenly >= evenly - least else "batches"


def _share_late_alone(task: SizingTask, setting: Setting) -> float:
    """Which share would be late even with a device for each."""
    if task.trace is None:
        late = sum(size.share for size in task.sizes if not setting.is_in_time(size))
        return late / sum(size.share for size in task.sizes)
    arrivals = setting.workload(task.speed, task.first_seed)
    return sum(setting.alone_s(example_of(one)) > one.slo_s for one in arrivals) / len(arrivals)


def least_replicas(task: SizingTask, setting: Setting) -> int:
    """Return how many replicas have the time that the wanted share takes in full batches."""
    (pool,) = setting.pools
    cost = share_cost(pool.cost, pool.asked.max_batch)

    def image_s(one: RequestView) -> float:
        return one.num_steps * step_s(cost, work_of([one]))

    if task.trace is None:
        shares = sum(size.share for size in task.sizes)
        pairs = zip(task.sizes, setting.examples, strict=True)
        busy = task.load * sum(size.share / shares * image_s(example) for size, example in pairs)
        return max(1, math.ceil(task.attainment * busy))
    arrivals = setting.workload(task.speed, task.first_seed)
    works_s = sorted(image_s(example_of(one)) for one in arrivals)
    # those that may be late may be the longest ones, and the last may end at their deadlines
    num_wanted = math.ceil(task.attainment * len(works_s) - _ROUNDING)
    return max(1, math.ceil(sum(works_s[:num_wanted]) / max(one.deadline_s for one in arrivals)))


def plan_cell(content: Mapping[str, Any], path: Path, run: Run) -> Plan:
    """Size the task of a file on every device; errors as of :func:`plan_task`."""
    task = validated(SizingTask, content, f"task {path}")
    sizings = [size_device(task, device, run, path.parent) for device in task.devices]
    kinds = ", ".join(dict.fromkeys(kind for one in sizings for kind in one.kinds))
    is_one = all(size.slo_s is None and size.slo_times_alone is None for size in task.sizes)
    # requests of a trace have deadlines of their own
    within = "in time" if task.trace is not None or not is_one else f"within {task.slo_s:g} s"
    load = f"{task.load:g} requests a second"
    if task.trace is not None:
        load = f"the requests of {task.trace} at speed {task.speed:g}"
    failures = "" if task.mtbf_s is None else f", replicas that fail every {task.mtbf_s:g} s"
    share = f"{task.attainment:.1%}"
    title = (
        f"{task.name}: {load}, {share} of them {within}{failures}, policy {task.policy} "
        f"(simulated, {kinds} times)"
    )
    labels = [f"{one.device.profile}, batches of {one.device.max_batch}" for one in sizings]
    heads = ("replicas", "if requests came evenly", "in full batches", "per hour", "in time, %")
    cells = [_cells(one, task) for one in sizings]
    rows = [row for row in zip((*heads, "what binds"), *cells, strict=True) if any(row[1:])]
    notes = [
        f"Enough is where the mean over seeds reaches {share}; its 95 % interval may reach below."
    ]
    for label, one in zip(labels, sizings, strict=True):
        if one.tried:
            tried = ", ".join(f"{n}: {mean.as_points()} %" for n, mean in one.tried.items())
            notes.append(f"{label}, replicas and what they attain (simulated): {tried}")
    figures = {
        "simulated": True,
        "task": task.model_dump(mode="json"),
        "devices": [_figures(one) for one in sizings],
    }
    return Plan(Table(title, ["", *labels], rows), notes, figures)


def _cells(one: Sizing, task: SizingTask) -> list[str]:
    more = f"more than {task.most_replicas}"
    is_possible = one.binds != "latency"
    # nothing was simulated where even full batches are too many, and a trace is as it is
    is_known = bool(one.tried) and task.trace is None
    return [
        str(one.found or more) if is_possible else "none",
        str(one.evenly or more) if is_known else "",
        str(one.least) if is_possible else "",
        "" if one.per_hour is None else f"{one.per_hour:.2f}",
        "" if one.shown is None else one.shown.as_points(),
        _BINDS[one.binds],
    ]


def _figures(one: Sizing) -> Mapping[str, Any]:
    return {
        "device": one.device.model_dump(mode="json"),
        "profile_kinds": list(one.kinds),
        "replicas": one.found,
        "replicas_if_even": one.evenly,
        "replicas_in_full_batches": one.least or None,
        "per_hour": one.per_hour,
        "attainment": None if one.shown is None else one.shown.as_figures(),
        "binds": one.binds,
        "tried": {str(number): mean.as_figures() for number, mean in one.tried.items()},
    }


# cascades


class CascadeSizingTask(CascadeExperiment):
    """What is wanted of a cascade: keys of an experiment without its number of GPUs."""

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
        return self.model_copy(update={"num_gpus": num_gpus})

    @property
    def least_gpus(self) -> int:
        """How many have the time that the light images of the wanted share take, and one more.

        One more, as there is a replica of each model.
        """
        light = self.setting().fleet.pools[0]
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
        return self.violations.value <= task.most_violations

    def is_good(self, task: CascadeSizingTask) -> bool:
        if task.worst_quality is None:
            return True
        sign = 1 if task.files.curves.quality.lower_is_better else -1
        return sign * self.quality.value <= sign * task.worst_quality


def size_cascade(
    task: CascadeSizingTask, tuned: Sequence[TunedSettings], run: Run
) -> Search[Tried]:
    """Find the fewest GPUs that keep deadlines and quality.

    More GPUs are assumed to attain more, on the same requests.
    """
    tried: dict[int, Tried] = {}

    def enough(num_gpus: int) -> bool:
        parts = control_parts(task.with_gpus(num_gpus), tuned)
        rows: Sequence[ControlRow] = run(parts, f"{num_gpus} GPUs")
        tried[num_gpus] = found = Tried(
            mean_of([one.figures["violations"] for one in rows]),
            mean_of([one.figures[task.files.quality.key] for one in rows]),
            _at_peak(next(one.course for one in rows if one.course is not None)),
        )
        return found.is_in_time(task) and found.is_good(task)

    least = task.least_gpus
    found = fewest(least, task.most_gpus, enough) if least <= task.most_gpus else None
    below = max(tried, default=0) if found is None else found - 1
    binds: Binds = "throughput"
    if below in tried:
        binds = "quality" if tried[below].is_in_time(task) else "deadlines"
    return Search(least, found, binds, dict(sorted(tried.items())))


def _at_peak(course: Course) -> dict[str, int]:
    """Ready replicas by pool in the round after the bin in which most requests arrived."""
    totals = [sum(counts) for counts in zip(*course.arrived.values(), strict=True)]
    peak_s = course.bin_s * (totals.index(max(totals)) + 1)
    state = next((one for one in course.states if one.now_s >= peak_s), course.states[-1])
    return {one.pool: one.num_ready for one in state.pools}


def plan_cascade(content: Mapping[str, Any], path: Path, run: Run) -> Plan:
    """Size the cascade of a file; errors as of :func:`plan_task`."""
    task = validated(CascadeSizingTask, content, f"task {path}")
    try:
        task = task.located(path.parent)
        tuned = task.with_gpus(task.most_gpus).tuned()
    except ValueError as error:
        raise ConfigError(f"the task {path}: {error}") from None
    sizing, quality = size_cascade(task, tuned, run), task.files.quality
    shown = sizing.shown
    at_peak = {} if shown is None else shown.at_peak

    def score(one: Tried) -> str:
        return f"{one.quality.value:.{quality.digits}f}"

    notes = "; ".join(
        f"{gpus}: {one.violations.as_points()} % late, {quality.title} {score(one)}"
        for gpus, one in sizing.tried.items()
    )
    figures = {
        "simulated": True,
        "task": task.model_dump(mode="json"),
        "gpus": sizing.found,
        "least": sizing.least,
        "at_peak": dict(at_peak),
        "binds": sizing.binds,
        "tried": {
            str(gpus): {
                "violations": one.violations.as_figures(),
                quality.key: one.quality.as_figures(),
            }
            for gpus, one in sizing.tried.items()
        },
    }
    row = [
        f"more than {task.most_gpus}"
        if sizing.found is None
        else f"{sizing.found} (at least {sizing.least})",
        "" if shown is None else shown.violations.as_points(),
        "" if shown is None else score(shown),
        ", ".join(f"{number} {pool}" for pool, number in at_peak.items()),
        _LIGHT if sizing.binds == "throughput" else _BINDS[sizing.binds],
    ]
    columns = ["GPUs", "late, %", quality.title, "at the peak", "what binds"]
    note = f"GPUs and what they attain (simulated): {notes}"
    return Plan(Table(_title(task), columns, [row]), [note], figures)


def _title(task: CascadeSizingTask) -> str:
    files, wanted = task.files, f"at most {task.most_violations:.1%} late"
    if task.worst_quality is not None:
        bound = "most" if files.curves.quality.lower_is_better else "least"
        wanted += f", {files.quality.title} at {bound} {task.worst_quality:g}"
    rates = f"{task.low_per_s:g} to {task.high_per_s:g}"
    if task.trace is not None:
        rates = f"{task.mean_per_s:.3g} on average of {task.trace}"
    kinds = ", ".join(dict.fromkeys((*files.light.kinds, *files.heavy.kinds)))
    return (
        f"{task.name}: {rates} requests a second within {task.slo_s:g} s, {wanted}, policy "
        f"{task.policies[0]} (simulated, {kinds} times)"
    )
