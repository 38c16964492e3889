"""Experiments with requests of several sizes on replicas of one device each.

The same arrivals under several policies, over loads and seeds. Refused, dropped and late requests
are missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ray_cluster.policies.cost_fit import FittedCost, fit_step_cost
from ray_cluster.policies.cost_model import step_s, work_of
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.profiles.files import load_profile
from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.cell import Cell, CellResult, CellSpec, PoolSpec
from ray_cluster.simulator.cell_policies import CellPolicy, cell_policy
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Arrival, Kind, Mix, draw_workload

# of one run, which takes some minutes then
_MOST_REQUESTS = 2_000_000
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Model = "model"


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
            cell_policy(name, cost=StepCost(1.0, 1.0), examples=_some_views(), max_batch=2)
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
        most = max(self.rates_per_s) * self.duration_s
        if most > _MOST_REQUESTS:
            raise ValueError(
                f"rates_per_s times duration_s is {most:,.0f} requests a run; at most "
                f"{_MOST_REQUESTS:,} are possible: lower one of them"
            )
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


@dataclass(frozen=True)
class CellRow:
    """What one simulation showed.

    Attributes:
        attainment: share of the arrivals that were done in time.
        attainment_by_class: the same of each size.
        refused: share that was refused.
        broken: share of what was let in that was late or dropped.
        met: per arrival, whether it was done in time, as a string of ``0`` and ``1``.
        let_in: likewise, whether it was let in.
    """

    run: CellRun
    num_arrivals: int
    attainment: float
    attainment_by_class: Mapping[str, float]
    refused: float
    broken: float
    met: str
    let_in: str


def run_cell(experiment: CellExperiment, run: CellRun) -> CellRow:
    """Simulate one policy, rate and seed."""
    setting = Setting.of(experiment)
    workload = setting.workload(run.rate_per_s, run.seed)
    policy = cell_policy(
        run.policy,
        cost=setting.cost,
        examples=setting.examples,
        max_batch=experiment.max_batch,
    )
    result = Cell(setting.spec(policy, run.seed)).run(workload)
    return _row(run, result)


def _row(run: CellRun, result: CellResult) -> CellRow:
    fates = result.fates
    let_in = [fate for fate in fates if fate.end != "refused"]
    return CellRow(
        run=run,
        num_arrivals=len(fates),
        attainment=result.attainment,
        attainment_by_class=result.attainment_by_class(),
        refused=(len(fates) - len(let_in)) / max(1, len(fates)),
        broken=sum(not fate.is_met for fate in let_in) / max(1, len(let_in)),
        met="".join("01"[fate.is_met] for fate in fates),
        let_in="".join("01"[fate.end != "refused"] for fate in fates),
    )


@dataclass(frozen=True)
class Setting:
    """An experiment's costs, requests and cells.

    Attributes:
        fitted: the profile's cost, with its error.
        cost: what a step takes in the simulation.
        examples: a request of each size.
    """

    experiment: CellExperiment
    fitted: FittedCost
    kinds: tuple[str, ...]
    cost: StepCost
    examples: tuple[RequestView, ...]

    @classmethod
    def of(cls, experiment: CellExperiment) -> Setting:
        """Work out a setting; ConfigError if the profile can't be read."""
        profile = load_profile(experiment.profile)
        fitted = fit_step_cost(profile)
        examples = tuple(_example(size, experiment) for size in experiment.sizes)
        cost = with_batching_gain(fitted.cost, examples, experiment.batching_gain)
        return cls(experiment, fitted, profile.kinds, cost, examples)

    def alone_s(self, size: SizeShare) -> float:
        """Seconds of an image of a size with the device for itself."""
        return self.experiment.steps * step_s(self.cost, work_of([_example(size, self.experiment)]))

    def workload(self, rate_per_s: float, seed: int) -> Sequence[Arrival]:
        """Draw the arrivals of a seed."""
        experiment = self.experiment
        kinds = tuple(
            Kind(
                size.share,
                _Model,
                size.width,
                size.height,
                experiment.steps,
                uses_guidance=experiment.guidance,
                slo_class=size.name,
            )
            for size in experiment.sizes
        )
        slo_s = {
            size.name: experiment.slo_s or experiment.slo_times_alone * self.alone_s(size)
            for size in experiment.sizes
        }
        mix = Mix(kinds, lambda kind: slo_s[kind.slo_class])
        curve = constant_rate(rate_per_s, experiment.duration_s)
        drawn = draw_workload(mix, curve, seed=seed, cv=experiment.cv)
        return [replace(one, fewest_steps=experiment.fewest_steps) for one in drawn]

    def spec(self, policy: CellPolicy, seed: int) -> CellSpec:
        """Return the cell that runs a policy."""
        experiment = self.experiment
        pool = PoolSpec(
            name="pool",
            model=_Model,
            num_replicas=experiment.replicas,
            hardware=Hardware(self.cost, noise_cv=experiment.step_noise),
            max_batch=experiment.max_batch,
            max_in_flight=policy.max_in_flight or experiment.max_batch,
            told_cost=_times(self.cost, experiment.told_times),
            policy=policy.steps,
        )
        return CellSpec(
            (pool,),
            seed=seed,
            promises_deadlines=policy.promises_deadlines,
            when_late=policy.when_late,
            most_steps=policy.most_steps,
        )


def with_batching_gain(cost: StepCost, examples: Sequence[RequestView], gain: float) -> StepCost:
    """Return a cost whose shared part is so many times as large.

    What a request takes alone stays the same on average over the examples: a larger shared part
    means that batches save more.
    """
    alone_s = sum(step_s(cost, work_of([one])) for one in examples) / len(examples)
    own_s = alone_s - cost.fixed_s
    if gain * cost.fixed_s >= alone_s or own_s <= 0:
        raise ValueError(
            f"a batching gain of {gain:g} leaves nothing of a step to each request; at most "
            f"{alone_s / cost.fixed_s:.2f} is possible here"
        )
    factor = (alone_s - gain * cost.fixed_s) / own_s
    return replace(
        _times(cost, factor),
        fixed_s=gain * cost.fixed_s,
        decode_per_megapixel_s=cost.decode_per_megapixel_s,
    )


def _times(cost: StepCost, factor: float) -> StepCost:
    return replace(
        cost,
        fixed_s=factor * cost.fixed_s,
        per_megapixel_s=factor * cost.per_megapixel_s,
        per_squared_megapixel_s=factor * cost.per_squared_megapixel_s,
        per_further_size_s=factor * cost.per_further_size_s,
    )


def _example(size: SizeShare, experiment: CellExperiment) -> RequestView:
    return RequestView(
        request_id=size.name,
        model=_Model,
        width_px=size.width,
        height_px=size.height,
        num_steps=experiment.steps,
        uses_guidance=experiment.guidance,
        priority=0,
        arrival_s=0.0,
        deadline_s=float("inf"),
    )


def _some_views() -> tuple[RequestView, ...]:
    return tuple(RequestView(f"{px}", _Model, px, px, 1, False, 0, 0.0, 1.0) for px in (512, 768))
