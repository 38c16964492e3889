"""How many replicas a workload needs: a bound from the cost model, and simulations above it.

The bound says what can't be enough, whatever the policy; the simulation says what is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError
from ray_cluster.policies.cost_model import share_cost, step_s, work_of
from ray_cluster.policies.types import RequestView
from ray_cluster.simulator.cell_experiment import (
    CellExperiment,
    SizeShare,
    check_length,
    check_policy,
)
from ray_cluster.simulator.cell_runs import CellRow, Setting
from ray_cluster.simulator.cell_workload import example_of
from ray_cluster.simulator.intervals import Mean, mean_of

_HERE = Path()
_ROUNDING = 1e-9
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Binds = Literal["latency", "throughput", "bursts", "batches", "peaks"]
"""What keeps a smaller number from being enough: an image alone takes longer than its deadline
allows; or replicas that never idle, in full batches, would not do. Where they would, it is what
bursts cost over even arrivals, or what these cost over full batches, whichever is more; of a trace,
that its requests come at some times more than at others, or fill no batches."""

# what simulations say in the same words, and check
_OF_EXPERIMENTS = {
    *("sizes", "steps", "guidance", "duration_s", "slo_s", "trace", "model"),
    *("mtbf_s", "repair_s", "load_s"),
}

Evaluate = Callable[[CellExperiment], Sequence[CellRow]]
"""Runs an experiment's only policy at its only rate with all its seeds."""


class Device(BaseModel):
    """A kind of device that replicas can be on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = Field(description="a latency profile, by its name or path")
    max_batch: int = Field(12, ge=1, le=1024)
    price_per_hour: float = Field(0.0, ge=0, allow_inf_nan=False, description="of one replica")


class SizingTask(BaseModel):
    """What is wanted."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, max_length=100, pattern=r"^[a-z0-9-]+$")
    devices: tuple[Device, ...] = Field(min_length=1)
    sizes: tuple[SizeShare, ...] = ()
    steps: int = Field(50, ge=1, le=1000)
    guidance: bool = True
    rate_per_s: _Positive | None = Field(None, le=1e6, description="at the peak")
    cv: float = Field(1.0, ge=0, le=10, description="of the gaps between arrivals")
    trace: str | None = Field(None, min_length=1, description="beside the file: replayed instead")
    model: str | None = Field(None, min_length=1, description="whose requests are replayed")
    speed: _Positive = Field(1.0, description="of the replay")
    slo_s: _Positive | None = Field(None, description="seconds to the deadline")
    mtbf_s: float | None = Field(
        None, ge=10, allow_inf_nan=False, description="mean seconds between a replica's failures"
    )
    repair_s: float = Field(0.0, ge=0, le=1e6, description="from a failure until it starts to load")
    load_s: float | None = Field(None, ge=0, le=1e6, description="until it serves again")
    policy: str = Field("deadline", description="of a cell; what the service does")
    attainment: float = Field(0.99, gt=0, lt=1, description="share that must be done in time")
    most_replicas: int = Field(1024, ge=1, le=4096)
    duration_s: float = Field(300.0, gt=0, le=30 * 86400)
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
        """The simulation of so many replicas on a device, with requests in even gaps or its own."""
        content = self.model_dump(include=self.model_fields_set & _OF_EXPERIMENTS) | {
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


def size_device(
    task: SizingTask, device: Device, evaluate: Evaluate, folder: Path = _HERE
) -> Sizing:
    """Find the fewest replicas of a device that attain what is wanted.

    More replicas are taken to attain more, on the same arrivals.

    Args:
        task: what is wanted.
        device: of the replicas.
        evaluate: runs a simulation's seeds.
        folder: of the task's file, beside which a trace lies.

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
        rows = evaluate(task.experiment(device, replicas, is_even=is_even))
        return mean_of([row.attainment for row in rows])

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
    """Return how many replicas have the seconds that the wanted share takes in full batches."""
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
    # who is given up may be those that take longest, and the last may end at their deadlines
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
