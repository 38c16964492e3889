"""How many replicas a workload needs: a bound from the cost model, and simulations above it.

The bound is what cannot be enough, whatever the policy; simulations find what is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError
from ray_cluster.policies.costs.cost_model import share_cost, step_s, work_of
from ray_cluster.policies.types import RequestView
from ray_cluster.simulator.cell.experiment import (
    CellExperiment,
    Positive,
    Requests,
    check_length,
    check_policy,
)
from ray_cluster.simulator.cell.runs import Setting, run_cell
from ray_cluster.simulator.cell.workload import example_of
from ray_cluster.simulator.experiment import Name, validated
from ray_cluster.simulator.reports import Table
from ray_cluster.simulator.results import Mean, Row, mean_of

_HERE = Path()
_ROUNDING = 1e-9

Binds = Literal["latency", "throughput", "bursts", "batches", "peaks"]
"""What keeps a smaller number from being enough."""
_BINDS: Mapping[Binds, str] = {
    "latency": "latency: an image alone takes longer than its deadline allows",
    "throughput": "throughput: fewer could not make so many even in batches that are always full",
    "bursts": "bursts: most beyond full batches would go if requests came evenly",
    "batches": "batches: most beyond full batches is for batches that this policy does not fill",
    "peaks": "peaks: fewer would do if the trace were even and filled all batches",
}

Run = Callable[[Sequence[Callable[[], Any]], str], Sequence[Any]]
"""Calls functions, in other processes or not, and returns their results; also gets a label."""


@dataclass(frozen=True)
class Plan:
    """What a task was answered with.

    Attributes:
        notes: sentences below the table.
        figures: for the JSON file.
    """

    table: Table
    notes: Sequence[str]
    figures: Mapping[str, Any]


class Device(BaseModel):
    """A kind of device that replicas can be on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = Field(description="a latency profile, by its name or path")
    max_batch: int = Field(12, ge=1, le=1024)
    price_per_hour: float = Field(0.0, ge=0, allow_inf_nan=False, description="of one replica")


class SizingTask(Requests):
    """What is wanted."""

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
        misplaced = {"speed"} if self.trace is None else {"rate_per_s", "cv"}
        for name in sorted(misplaced & self.model_fields_set):
            why = (
                "without a trace" if self.trace is None else "with a trace, which says that itself"
            )
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
        content |= {
            "kind": "cell",
            "name": self.name,
            "what": f"{replicas} replicas",
            "profile": device.profile,
            "replicas": replicas,
            "max_batch": device.max_batch,
            "policies": (self.policy,),
            "first_seed": self.first_seed,
            "num_seeds": self.num_seeds,
        }
        if self.trace is None:
            content |= {"rates_per_s": (self.rate_per_s,), "cv": 0.0 if is_even else self.cv}
        else:
            content |= {"speeds": (self.speed,)}
        return CellExperiment.model_validate(content)


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a device would need.

    Attributes:
        least: replicas below which no policy can do it; 0 where no number can.
        replicas: the fewest that were seen to do it; None where no number up to the most does.
        evenly: the fewest that do it if requests come in even gaps; likewise, and None where
            nothing was simulated, or a trace is replayed.
        attainment: with those, or with the most.
        binds: what keeps fewer from being enough.
        tried: replicas that were simulated, with what they attained.
    """

    device: Device
    kinds: tuple[str, ...]
    least: int
    replicas: int | None
    attainment: Mean | None
    binds: Binds
    evenly: int | None = None
    tried: tuple[tuple[int, Mean], ...] = ()

    @property
    def per_hour(self) -> float | None:
        """The price of the replicas; None without one."""
        price = self.device.price_per_hour
        return self.replicas * price if self.replicas is not None and price else None


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
        return Sizing(device, setting.kinds, 0, None, None, "latency")
    least = least_replicas(task, setting)
    if least > task.most_replicas:
        return Sizing(device, setting.kinds, least, None, None, "throughput")
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

    found = fewest(least, task.most_replicas, enough)
    attained = tried[found] if found is not None else tried[max(tried)]
    most = task.most_replicas if found is None else found
    evenly = None
    if task.trace is None:
        evenly = least if found == least else fewest(least, most, enough_evenly)
    return Sizing(
        device,
        setting.kinds,
        least,
        found,
        attained,
        "peaks" if task.trace and found != least else _what_binds(least, evenly, found),
        evenly,
        tuple(sorted(tried.items())),
    )


def _what_binds(least: int, evenly: int | None, found: int | None) -> Binds:
    """What most of the replicas beyond the least are for."""
    if found == least:
        return "throughput"
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
    span_s = max(one.arrival_s + one.slo_s for one in arrivals)
    return max(1, math.ceil(sum(works_s[:num_wanted]) / span_s))


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


def plan_cell(content: Mapping[str, Any], path: Path, run: Run) -> Plan:
    """Size the task of a file on every device.

    Raises:
        ConfigError: the file says what is not allowed, or names a file that can't be used.
    """
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
    title = (
        f"{task.name}: {load}, {task.attainment:.1%} of them {within}{failures}, policy "
        f"{task.policy} (simulated, {kinds} times)"
    )
    labels = [f"{one.device.profile}, batches of {one.device.max_batch}" for one in sizings]
    cells = [_cells(one, task) for one in sizings]
    rows = [row for row in zip(_ROWS, *cells, strict=True) if any(row[1:])]
    share = f"{task.attainment:.1%}"
    notes = [
        f"Enough is where the mean over seeds reaches {share}; its 95 % interval may reach below."
    ]
    for label, one in zip(labels, sizings, strict=True):
        if one.tried:
            tried = ", ".join(f"{number}: {mean.as_points()} %" for number, mean in one.tried)
            notes.append(f"{label}, replicas and what they attain (simulated): {tried}")
    figures = {
        "simulated": True,
        "task": task.model_dump(mode="json"),
        "devices": [_figures(one) for one in sizings],
    }
    return Plan(Table(title, ["", *labels], rows), notes, figures)


_ROWS = (
    *("replicas", "if requests came evenly", "in full batches", "per hour", "in time, %"),
    "what binds",
)


def _cells(one: Sizing, task: SizingTask) -> list[str]:
    more = f"more than {task.most_replicas}"
    is_possible = one.binds != "latency"
    # nothing was simulated where even full batches are too many, and a trace is as it is
    is_known = bool(one.tried) and task.trace is None
    return [
        str(one.replicas or more) if is_possible else "none",
        str(one.evenly or more) if is_known else "",
        str(one.least) if is_possible else "",
        "" if one.per_hour is None else f"{one.per_hour:.2f}",
        "" if one.attainment is None else one.attainment.as_points(),
        _BINDS[one.binds],
    ]


def _figures(one: Sizing) -> Mapping[str, Any]:
    return {
        "device": one.device.model_dump(mode="json"),
        "profile_kinds": list(one.kinds),
        "replicas": one.replicas,
        "replicas_if_even": one.evenly,
        "replicas_in_full_batches": one.least or None,
        "per_hour": one.per_hour,
        "attainment": None if one.attainment is None else one.attainment.as_figures(),
        "binds": one.binds,
        "tried": {str(number): mean.as_figures() for number, mean in one.tried},
    }
