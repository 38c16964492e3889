"""Experiments with requests of several sizes on replicas of one device each.

The same arrivals under several policies, over loads and seeds. Refused, dropped and late requests
are missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.cell_policies import cell_policy

# of one run, which takes some minutes then
_MOST_REQUESTS = 2_000_000
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class SizeShare(BaseModel):
    """Requests of one size."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(ge=8, le=16384)
    height: int = Field(ge=8, le=16384)
    share: _Positive = 1.0

    @property
    def name(self) -> str:
        """Its service class."""
        return f"{self.width}x{self.height}"


class CellExperiment(BaseModel):
    """What is simulated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["cell"]
    name: str = Field(min_length=1, pattern=r"^[a-z0-9-]+$")
    what: str = Field(min_length=1, description="for readers of the report")
    profile: str = Field(description="a latency profile, by its name or path")
    sizes: tuple[SizeShare, ...] = Field(min_length=1)
    steps: int = Field(50, ge=1, le=1000)
    fewest_steps: int | None = Field(
        None, ge=1, description="with how many steps clients put up, to be in time; all if absent"
    )
    guidance: bool = True
    slo_times_alone: _Positive = Field(
        5.0, description="seconds to the deadline, in units of the request's own duration alone"
    )
    slo_s: _Positive | None = Field(None, description="seconds to the deadline, instead of that")
    replicas: int = Field(4, ge=1, le=4096)
    max_batch: int = Field(12, ge=1, le=1024)
    rates_per_s: tuple[_Positive, ...] = Field(min_length=1)
    duration_s: float = Field(300.0, gt=0, le=30 * 86400)
    cv: float = Field(1.0, ge=0, le=10, description="of the gaps between arrivals")
    policies: tuple[str, ...] = Field(min_length=1)
    first_seed: int = Field(1000, ge=0)
    num_seeds: int = Field(30, ge=1, le=1000)
    batching_gain: _Positive = Field(
        1.0, description="factor on the part of a step that a batch shares"
    )
    step_noise: float = Field(0.0, ge=0, le=1, description="CV of equal steps")
    told_times: _Positive = Field(1.0, description="what replicas say a step takes, over the truth")

    @field_validator("policies")
    @classmethod
    def _check_policies(cls, policies: tuple[str, ...]) -> tuple[str, ...]:
        for name in policies:
            check_policy(name)
        return policies

    @model_validator(mode="after")
    def _check_together(self) -> CellExperiment:
        for name in ("policies", "rates_per_s"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must differ from each other; given {list(values)}")
        if (self.fewest_steps or 1) > self.steps:
            raise ValueError(
                f"fewest_steps must be at most steps, {self.steps}; given {self.fewest_steps}"
            )
        check_length(max(self.rates_per_s), self.duration_s)
        return self

    @property
    def seeds(self) -> range:
        """Those that are run."""
        return range(self.first_seed, self.first_seed + self.num_seeds)

    def runs(self) -> Iterator[CellRun]:
        """Every simulation of the experiment; those of one seed and rate have equal arrivals."""
        for rate in self.rates_per_s:
            for seed in self.seeds:
                for policy in self.policies:
                    yield CellRun(policy, rate, seed)


class CellRun(NamedTuple):
    """One simulation."""

    policy: str
    rate_per_s: float
    seed: int


def check_policy(name: str) -> None:
    """Refuse a name that stands for no policy; ValueError."""
    cell_policy(name, cost=StepCost(1.0, 1.0), examples=_some_views(), max_batch=2)


def check_length(rate_per_s: float, duration_s: float) -> None:
    """Refuse a simulation of more requests than it could bear; ValueError."""
    most = rate_per_s * duration_s
    if most > _MOST_REQUESTS:
        raise ValueError(
            f"{rate_per_s:g} requests a second for {duration_s:g} s are {most:,.0f} a run; at most "
            f"{_MOST_REQUESTS:,} are possible: lower the rate or the duration"
        )


def _some_views() -> tuple[RequestView, ...]:
    return tuple(RequestView(f"{px}", "model", px, px, 1, False, 0, 0.0, 1.0) for px in (512, 768))
