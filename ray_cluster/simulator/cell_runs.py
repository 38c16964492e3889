"""Runs the simulations of an experiment on replicas of one device each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.cost_fit import FittedCost, fit_step_cost
from ray_cluster.policies.cost_model import step_s, work_of
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.profiles.files import load_profile
from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.cell import Cell, CellResult, CellSpec, PoolSpec
from ray_cluster.simulator.cell_experiment import CellExperiment, CellRun, SizeShare
from ray_cluster.simulator.cell_policies import CellPolicy, cell_policy
from ray_cluster.simulator.noise import Hardware
from ray_cluster.simulator.workload import Arrival, Kind, Mix, draw_workload

_MODEL = "model"


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
                _MODEL,
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
            model=_MODEL,
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
        model=_MODEL,
        width_px=size.width,
        height_px=size.height,
        num_steps=experiment.steps,
        uses_guidance=experiment.guidance,
        priority=0,
        arrival_s=0.0,
        deadline_s=float("inf"),
    )
