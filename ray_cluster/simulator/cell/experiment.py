"""Experiment files of the kind ``cell``: requests of several sizes, on replicas of one device each.

The same arrivals are served under several policies, over loads and seeds. Refused, dropped and late
requests count as missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.cell.policies import CellPolicy, cell_policy
from ray_cluster.simulator.controlnets.add_ons import MixName
from ray_cluster.simulator.experiment import IN_TRACE, MOST_REQUESTS, Experiment, PrintedName

# with fewer expected a seed may have none at all
_FEWEST_REQUESTS = 5
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# keys that exclude each other
_OF_DRAWN = (
    *("sizes", "rates_per_s", "duration_s", "night", "cv", "steps", "fewest_steps", "guidance"),
    "add_ons",
)
_OF_TRACES = ("speeds", "model")
_OF_FAILURES = ("repair_s", "load_s")
_OF_ONE_POOL = ("profile", "replicas", "max_batch")


class SizeShare(BaseModel):
    """Requests of one size; what is absent is the experiment's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    width: int = Field(ge=8, le=16384)
    height: int = Field(ge=8, le=16384)
    share: Positive = Field(1.0, le=1e6)
    steps: int | None = Field(None, ge=1, le=1000)
    guidance: bool | None = None
    slo_s: Positive | None = Field(None, description="seconds to the deadline")
    slo_times_alone: Positive | None = Field(None, description="durations alone, instead of that")
    priority: int = Field(0, ge=-100, le=100)
    slo_class: PrintedName | None = Field(None, description="under which it is counted")

    @model_validator(mode="after")
    def _check_deadline(self) -> SizeShare:
        if self.slo_s is not None and self.slo_times_alone is not None:
            raise ValueError(
                f"a size has slo_s or slo_times_alone; given {self.slo_s:g} and "
                f"{self.slo_times_alone:g}"
            )
        return self

    @property
    def name(self) -> str:
        return self.slo_class or f"{self.width}x{self.height}"


class CellPool(BaseModel):
    """Replicas on one kind of device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: str = Field(description="a latency profile, by its name or path")
    replicas: int = Field(4, ge=1, le=4096)
    max_batch: int = Field(12, ge=1, le=1024)
    times: Positive = Field(1.0, le=100, description="factor on the profile's step times")


class Requests(BaseModel):
    """Keys about requests and failures that experiments and sizing tasks share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: tuple[SizeShare, ...] = ()
    steps: int = Field(50, ge=1, le=1000)
    guidance: bool = True
    slo_s: Positive | None = Field(None, description="seconds to the deadline")
    duration_s: float = Field(300.0, gt=0, le=30 * 86400)
    cv: float = Field(1.0, ge=0, le=10, description="of the gaps between arrivals")
    trace: str | None = Field(None, min_length=1, description="beside the file: replayed instead")
    model: str | None = Field(None, min_length=1, description="whose requests are replayed")
    mtbf_s: float | None = Field(
        None, ge=10, allow_inf_nan=False, description="mean seconds between a replica's failures"
    )
    repair_s: float = Field(0.0, ge=0, le=1e6, description="from a failure until it starts to load")
    load_s: float | None = Field(None, ge=0, le=1e6, description="until it serves again")


class CellExperiment(Requests, Experiment):
    """What is simulated."""

    kind: Literal["cell"]
    profile: str | None = Field(None, description="a latency profile, by its name or path")
    replicas: int = Field(4, ge=1, le=4096)
    max_batch: int = Field(12, ge=1, le=1024)
    pools: tuple[CellPool, ...] = Field((), description="instead of the three before")
    fewest_steps: int | None = Field(
        None, ge=1, description="that clients accept to be in time; all steps if absent"
    )
    slo_times_alone: Positive = Field(
        5.0, description="seconds to the deadline, in units of the request's own duration alone"
    )
    rates_per_s: tuple[Positive, ...] = ()
    night: float | None = Field(
        None, ge=0, le=1, description="share of the rate at night; the same all day if absent"
    )
    add_ons: MixName = Field("none", description="the mix of ControlNets and LoRAs")
    speeds: tuple[Positive, ...] = Field((1.0,), min_length=1, description="of the replay")
    kept_add_ons: int = Field(10, ge=0, le=10_000, description="of each sort by a replica")
    transport_s: float = Field(
        0.005, ge=0, le=10, description="of a row's latents to a ControlNet's device and back"
    )
    one_way_s: float = Field(
        0.0,
        ge=0,
        le=0.5,
        description="of a message to or from a replica; with more the dispatcher would take leases "
        "for lost",
    )
    batching_gain: Positive = Field(
        1.0, description="factor on the part of a step that a batch shares"
    )
    step_noise: float = Field(0.0, ge=0, le=1, description="CV of equal steps")
    told_times: Positive = Field(
        1.0, le=100, description="step times that replicas report, over the true ones"
    )

    @field_validator("policies")
    @classmethod
    def _check_policies(cls, policies: tuple[str, ...]) -> tuple[str, ...]:
        for name in policies:
            check_policy(name)
        return policies

    @model_validator(mode="after")
    def _check_together(self) -> CellExperiment:
        if self.trace is not None:
            self._refuse(_OF_DRAWN, IN_TRACE)
        else:
            self._refuse(_OF_TRACES, "allowed only with a trace")
            for name in ("sizes", "rates_per_s"):
                if not getattr(self, name):
                    raise ValueError(f"{name}: given none; at least one is needed, or a trace")
        if self.pools:
            self._refuse(_OF_ONE_POOL, "each of the pools says that itself")
        elif self.profile is None:
            raise ValueError("profile: given none; a latency profile is needed, or pools")
        if self.mtbf_s is None:
            self._refuse(_OF_FAILURES, "allowed only with mtbf_s: without it no replica fails")
        self._check_services()
        self._check_sizes()
        for rate in self.rates_per_s:
            check_length(rate, self.duration_s)
        return self

    def _check_services(self) -> None:
        for name in self.policies:
            num = check_policy(name).num_services
            if num and self.pools:
                raise ValueError(
                    f"policies: given {name!r} with pools; allowed only with profile and replicas"
                )
            if num >= self.replicas:
                raise ValueError(
                    f"policies: given {name!r} with {self.replicas} replicas; at least one must be "
                    "left for the base"
                )

    def _check_sizes(self) -> None:
        seen: set[tuple[object, ...]] = set()
        for one in self.sizes:
            steps = one.steps or self.steps
            guidance = self.guidance if one.guidance is None else one.guidance
            like = (one.width, one.height, steps, guidance, one.priority, one.name)
            if like in seen:
                raise ValueError(
                    f"sizes: given {one.name} twice; allowed are sizes that differ in width, "
                    "height, steps, guidance, priority or slo_class"
                )
            seen.add(like)
            if (self.fewest_steps or 1) > steps:
                raise ValueError(
                    f"fewest_steps must be at most steps, {steps} of {one.name}; given "
                    f"{self.fewest_steps}"
                )

    @property
    def loads(self) -> tuple[float, ...]:
        """Over which policies are compared: rates per second, or speeds of the replay."""
        return self.rates_per_s if self.trace is None else self.speeds

    @property
    def load_words(self) -> str:
        return "per second" if self.trace is None else "speed"

    def load_name(self, load: float) -> str:
        return f"{load:g} per second" if self.trace is None else f"speed {load:g}"

    @property
    def all_pools(self) -> tuple[CellPool, ...]:
        """The pools, also where the file has the short form of one."""
        if self.profile is None:
            return self.pools
        return (CellPool(profile=self.profile, replicas=self.replicas, max_batch=self.max_batch),)

    @property
    def is_drawn(self) -> bool:
        """Whether seeds differ: a replay without noise and failures is always the same."""
        return self.trace is None or self.step_noise > 0 or self.mtbf_s is not None

    @property
    def seeds(self) -> range:
        return range(self.first_seed, self.first_seed + (self.num_seeds if self.is_drawn else 1))

    def runs(self) -> Iterator[CellRun]:
        """Every simulation of the experiment; those of one seed and load have equal arrivals."""
        for load in self.loads:
            for seed in self.seeds:
                for policy in self.policies:
                    yield CellRun(policy, load, seed)

    def shows(self, run: CellRun) -> bool:
        """Whether a run is shown over time: the first policy's, on the first seed of each load."""
        return (run.policy, run.seed) == (self.policies[0], self.first_seed)


class CellRun(NamedTuple):
    """One simulation.

    Attributes:
        load: the rate per second, or the speed of the replay.
    """

    policy: str
    load: float
    seed: int


def check_policy(name: str) -> CellPolicy:
    """Return the policy of a name, for any costs; ValueError if no policy has it."""
    examples = [RequestView(f"{px}", "model", px, px, 1, False, 0, 0.0, 1.0) for px in (512, 768)]
    return cell_policy(name, cost=StepCost(1.0, 1.0), examples=examples, max_batch=2)


def check_length(rate_per_s: float, duration_s: float) -> None:
    """Refuse a simulation of hardly any requests, or of far too many; ValueError."""
    number = rate_per_s * duration_s
    if not _FEWEST_REQUESTS <= number <= MOST_REQUESTS:
        raise ValueError(
            f"{rate_per_s:g} requests a second for {duration_s:g} s are {number:,.0f} a run; "
            f"allowed: {_FEWEST_REQUESTS} to {MOST_REQUESTS:,}; change the rate or the duration"
        )
