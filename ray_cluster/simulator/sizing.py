"""How many replicas a workload needs: a bound from the cost model, and simulations above it.

The bound says what can't be enough, whatever the policy; the simulation says what is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ray_cluster.config_problems import describe
from ray_cluster.errors import ConfigError
from ray_cluster.policies.cost_model import share_cost, step_s, work_of
from ray_cluster.simulator.cell_experiment import (
    CellExperiment,
    SizeShare,
    check_length,
    check_policy,
)
from ray_cluster.simulator.cell_runs import CellRow, Setting
from ray_cluster.simulator.intervals import Mean, mean_of

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

Binds = Literal["latency", "throughput", "bursts", "batches"]
"""What keeps a smaller number from being enough: an image alone takes longer than its deadline
allows; or replicas that never idle, in full batches, would not do. Where they would, it is what
bursts cost over even arrivals, or what these cost over full batches, whichever is more."""

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
    sizes: tuple[SizeShare, ...] = Field(min_length=1)
    steps: int = Field(50, ge=1, le=1000)
    guidance: bool = True
    rate_per_s: _Positive = Field(le=1e6, description="at the peak")
    cv: float = Field(1.0, ge=0, le=10, description="of the gaps between arrivals")
    slo_s: _Positive = Field(description="seconds to the deadline")
    policy: str = Field("deadline", description="of a cell; what the service does")
    attainment: float = Field(0.99, gt=0, lt=1, description="share that must be done in time")
    most_replicas: int = Field(1024, ge=1, le=4096)
    duration_s: float = Field(300.0, gt=0, le=30 * 86400)
    first_seed: int = Field(0, ge=0)
    num_seeds: int = Field(5, ge=1, le=100)

    @model_validator(mode="after")
    def _check(self) -> SizingTask:
        check_policy(self.policy)
        check_length(self.rate_per_s, self.duration_s)
        return self

    def experiment(self, device: Device, replicas: int, *, is_even: bool = False) -> CellExperiment:
        """The simulation of so many replicas on a device, with requests in even gaps or its own."""
        return CellExperiment(
            kind="cell",
            name=self.name,
            what=f"{replicas} replicas",
            profile=device.profile,
            sizes=self.sizes,
            steps=self.steps,
            guidance=self.guidance,
            slo_s=self.slo_s,
            replicas=replicas,
            max_batch=device.max_batch,
            rates_per_s=(self.rate_per_s,),
            duration_s=self.duration_s,
            cv=0.0 if is_even else self.cv,
            policies=(self.policy,),
            first_seed=self.first_seed,
            num_seeds=self.num_seeds,
        )


@dataclass(frozen=True, slots=True)
class Sizing:
    """What a device would need.

    Attributes:
        least: replicas below which no policy can do it; 0 where no number can.
        replicas: the fewest that were seen to do it; None where no number up to the most does.
        evenly: the fewest that do it if requests come in even gaps; likewise, and None where
            nothing was simulated.
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


def size_device(task: SizingTask, device: Device, evaluate: Evaluate) -> Sizing:
    """Find the fewest replicas of a device that attain what is wanted.

    More replicas are taken to attain more, on the same arrivals.

    Raises:
        ConfigError: the profile can't be used.
    """
    try:
        setting = Setting.of(task.experiment(device, 1))
    except ValidationError as error:
        raise ConfigError(describe(error, CellExperiment)) from None
    except ValueError as error:
        raise ConfigError(f"{device.profile}: {error}") from None
    late = sum(size.share for size in task.sizes if not setting.is_in_time(size))
    if late > (1 - task.attainment) * sum(size.share for size in task.sizes):
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
    evenly = least if found == least else fewest(least, most, enough_evenly)
    return Sizing(
        device,
        setting.kinds,
        least,
        found,
        attained,
        _what_binds(least, evenly, found),
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


def least_replicas(task: SizingTask, setting: Setting) -> int:
    """Return how many replicas have the seconds that the wanted share takes in full batches."""
    (pool,) = setting.pools
    cost = share_cost(pool.cost, pool.asked.max_batch)
    shares = sum(size.share for size in task.sizes)
    image_s = sum(
        size.share / shares * example.num_steps * step_s(cost, work_of([example]))
        for size, example in zip(task.sizes, setting.examples, strict=True)
    )
    return max(1, math.ceil(task.attainment * task.rate_per_s * image_s))


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
