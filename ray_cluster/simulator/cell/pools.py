"""What steps cost on the pools of a cell: their profiles, fitted and changed as the file says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray_cluster.errors import ConfigError
from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.policies.costs.cost_fit import FittedCost, fit_step_cost
from ray_cluster.policies.costs.cost_model import step_s, work_of
from ray_cluster.policies.costs.latency import LatencyProfile
from ray_cluster.policies.types import RequestView, StepCost
from ray_cluster.simulator.cell.experiment import CellExperiment, CellPool


@dataclass(frozen=True, slots=True)
class PricedPool:
    """A pool with its costs.

    Attributes:
        name: begins its replicas' names.
        fitted: the profile's cost, with its error.
        cost: what a step takes in the simulation.
        load_s: seconds that a replica loads after a failure.
    """

    name: str
    asked: CellPool
    profile: LatencyProfile
    fitted: FittedCost
    cost: StepCost
    load_s: float


def priced_pools(
    experiment: CellExperiment, examples: Sequence[RequestView]
) -> tuple[PricedPool, ...]:
    """Return an experiment's pools with their costs.

    Args:
        experiment: what is simulated.
        examples: a request of each size, over which a batching gain keeps the mean.

    Raises:
        ConfigError: a profile can't be read, or profiles are of several models.
        ValueError: a profile has no steps, or the gain leaves nothing of them.
    """
    pools, seen = [], Counter[str]()
    for asked in experiment.all_pools:
        profile = load_profile(asked.profile)
        fitted = fit_step_cost(profile)
        cost = with_batching_gain(fitted.cost, examples, experiment.batching_gain)
        load_s = experiment.load_s
        if load_s is None:
            load_s = next((row.seconds for row in profile.of("load")), 0.0)
        seen[asked.profile] += 1
        number = seen[asked.profile]
        name = asked.profile if number == 1 else f"{asked.profile}/{number}"
        if not experiment.pools:
            name = "pool"
        pools.append(PricedPool(name, asked, profile, fitted, times(cost, asked.times), load_s))
    models = {pool.profile.model for pool in pools}
    if len(models) > 1:
        raise ConfigError(
            f"pools: given profiles of {' and '.join(sorted(models))}; allowed are profiles of one "
            "model on several devices"
        )
    return tuple(pools)


def with_batching_gain(cost: StepCost, examples: Sequence[RequestView], gain: float) -> StepCost:
    """Return a cost whose shared part is multiplied by the gain.

    What a request takes alone stays the same on average over the examples, so that with a larger
    shared part batches save more.
    """
    alone_s = sum(step_s(cost, work_of([one])) for one in examples) / len(examples)
    own_s = alone_s - cost.fixed_s
    if gain * cost.fixed_s >= alone_s or own_s <= 0:
        raise ValueError(
            f"a batching gain of {gain:g} leaves nothing of a step to each request; at most "
            f"{alone_s / cost.fixed_s:.2f} is possible here"
        )
    factor = (alone_s - gain * cost.fixed_s) / own_s
    return replace(times(cost, factor), fixed_s=gain * cost.fixed_s)


def times(cost: StepCost, factor: float) -> StepCost:
    """Return a cost whose steps take so many times as long."""
    return replace(
        cost,
        fixed_s=factor * cost.fixed_s,
        per_megapixel_s=factor * cost.per_megapixel_s,
        per_squared_megapixel_s=factor * cost.per_squared_megapixel_s,
        per_further_size_s=factor * cost.per_further_size_s,
    )
