"""What experiments with a control loop have in common: keys of their files, policies, runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ray_cluster.policies.fleet import Fleet
from ray_cluster.policies.latency import LatencyProfile
from ray_cluster.policies.planner import Planner

TUNING_SEEDS = tuple(range(10))
# of one run, which takes some minutes then
_MOST_REQUESTS = 2_000_000
_MOST_ROUNDS = 100_000
# below it a seed may have none at all
_FEWEST_REQUESTS = 50

Rate = Annotated[float, Field(gt=0, le=1e6)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]
PeriodSeconds = Annotated[
    float, Field(ge=0.1, le=3600, description="from one round of planning to the next")
]
LoadSeconds = Annotated[float, Field(ge=0, le=3600, description="until a replica serves")]
NoiseCv = Annotated[
    float, Field(ge=0, le=1, description="of the seconds of equal batches, and of loads")
]
GapCv = Annotated[float, Field(ge=0, le=3, description="of the gaps between arrivals")]
Gain = Annotated[
    float,
    Field(gt=0, le=10, description="factor on what a batch saves against its images one by one"),
]


class ControlExperiment(BaseModel, ABC):
    """What every experiment with a control loop says."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str
    name: str = Field(min_length=1, max_length=100, pattern=r"^[a-z0-9-]+$")
    what: str = Field(min_length=1, description="for readers of the report")
    policies: tuple[str, ...] = Field(min_length=1)
    choices: Path | None = Field(None, description="settings of the policies, beside the file")
    first_seed: int = Field(1000, ge=0, lt=2**63)
    num_seeds: int = Field(30, ge=1, le=1000)
    duration_s: Seconds
    period_s: PeriodSeconds
    load_s: LoadSeconds
    noise_cv: NoiseCv = 0.03
    batching_gain: Gain = 1.0

    @field_validator("policies")
    @classmethod
    def _check_repeats(cls, policies: tuple[str, ...]) -> tuple[str, ...]:
        repeated = sorted({one for one in policies if policies.count(one) > 1})
        if repeated:
            raise ValueError(f"each may be there once; given twice: {', '.join(repeated)}")
        return policies

    @model_validator(mode="after")
    def _check_rounds(self) -> ControlExperiment:
        if self.span_s > _MOST_ROUNDS * self.period_s:
            raise ValueError(
                f"duration_s {self.duration_s:g}, with its last deadlines, and period_s "
                f"{self.period_s:g} are more than {_MOST_ROUNDS:,} rounds: shorten the day or plan "
                "less often"
            )
        return self

    @property
    @abstractmethod
    def span_s(self) -> float:
        """Seconds from the first request until the last has ended."""

    @property
    def seeds(self) -> range:
        """Those that are run."""
        return range(self.first_seed, self.first_seed + self.num_seeds)

    def shows(self, policy: str, seed: int) -> bool:
        """Whether a run is shown over time: the first two policies on the first seed."""
        return policy in self.policies[:2] and seed == self.first_seed

    @property
    @abstractmethod
    def profiles(self) -> tuple[LatencyProfile, ...]:
        """Of each model."""

    @property
    @abstractmethod
    def gpus_by_type(self) -> dict[str, int]:
        """How many there are of each type, as the fleet calls them."""

    @abstractmethod
    def fleet(self) -> Fleet:
        """Pools and services, from the profiles.

        Raises:
            ConfigError: a profile can't be read.
            ValueError: it lacks what is needed.
        """


def check_day(low_per_s: float, high_per_s: float, duration_s: float) -> None:
    """Refuse a day of no or of too many requests; ValueError."""
    if low_per_s > high_per_s:
        raise ValueError(
            f"low_per_s must be at most high_per_s, {high_per_s:g}; given {low_per_s:g}"
        )
    if not _FEWEST_REQUESTS <= high_per_s * duration_s / 2 <= _MOST_REQUESTS:
        raise ValueError(
            f"high_per_s {high_per_s:g} for duration_s {duration_s:g} are some "
            f"{high_per_s * duration_s / 2:,.0f} requests a run; allowed: {_FEWEST_REQUESTS} to "
            f"{_MOST_REQUESTS:,}"
        )


E = TypeVar("E", bound=ControlExperiment)
Settings = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ControlPolicy(Generic[E]):
    """A policy by its name.

    Attributes:
        build: its planner, from settings.
        knobs: names of the settings.
        candidates: settings to search among; the first are those of who did not search.
    """

    name: str
    build: Callable[[Fleet, E, Settings], Planner[Any]]
    knobs: tuple[str, ...]
    candidates: tuple[Settings, ...]


def grid(*axes: Iterable[float]) -> tuple[Settings, ...]:
    """Return all combinations of values, the last axis first to change."""
    return tuple(product(*axes))


class ControlRun(NamedTuple):
    """One simulation."""

    policy: str
    settings: Settings
    seed: int


def policy_named(policies: Sequence[ControlPolicy[E]], name: str) -> ControlPolicy[E]:
    """Return a policy by its name.

    Raises:
        ValueError: there is none.
    """
    for one in policies:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in policies)
    raise ValueError(f"policies: there is no policy {name!r}; there are {known}")
