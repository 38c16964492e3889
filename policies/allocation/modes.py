"""How a service may split its deadline between the batches of its models.

Given the split, a pool takes the batch of most images per second that is short enough. So a service
has few modes to choose from, instead of a batch per pool and the product of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ray_cluster.policies.allocation.problem import AllocationProblem, BatchOption, Pool, Service

# of a model's pools in their order; None for a pool all of whose batches take too long
Batches = tuple[BatchOption | None, ...]


@dataclass(frozen=True, slots=True)
class Mode:
    """A split of a service's deadline.

    Attributes:
        heavy: of the cascade's heavy model; None without a cascade.
        defers: whether images may go from the first model to the heavy one.
        is_late: whether even the shortest batches take longer than the deadline.
    """

    first: Batches
    heavy: Batches | None = None
    defers: bool = False
    is_late: bool = False

    @property
    def worth(self) -> tuple[float, ...]:
        """Rates of all pools, and whether it defers: all better when higher."""
        batches = (*self.first, *(self.heavy or ()))
        return (*(one.rate_per_s if one else 0.0 for one in batches), float(self.defers))


def modes_of(service: Service, problem: AllocationProblem) -> tuple[Mode, ...]:
    """Return the splits that no other one is better than, at least one."""
    found = list(_all_modes(service, problem))
    kept: dict[tuple[float, ...], Mode] = {}
    for mode in found:
        kept.setdefault(mode.worth, mode)
    modes = tuple(mode for worth, mode in kept.items() if not _is_dominated(worth, kept))
    return modes or (_shortest(service, problem),)


def _is_dominated(worth: tuple[float, ...], others: Iterable[tuple[float, ...]]) -> bool:
    return any(
        other != worth and all(a >= b for a, b in zip(other, worth, strict=True))
        for other in others
    )


def _all_modes(service: Service, problem: AllocationProblem) -> Iterator[Mode]:
    firsts = problem.pools_of(service.first.model)
    heavies = problem.pools_of(service.heavy.model) if service.heavy else None
    budget_s = service.budget_s
    if heavies is not None:
        for heavy_s in _lengths(heavies, budget_s):
            # less than all that is left for the first model would make nothing better
            if _lengths(firsts, budget_s - heavy_s):
                first = _within(firsts, budget_s - heavy_s)
                yield Mode(first, _within(heavies, heavy_s), defers=True)
    if _lengths(firsts, budget_s):
        # nothing is deferred: each model has the whole deadline for itself
        heavy = _within(heavies, budget_s) if heavies is not None else None
        yield Mode(_within(firsts, budget_s), heavy)


def _within(pools: tuple[Pool, ...], seconds: float) -> Batches:
    return tuple(pool.best_within(seconds) for pool in pools)


def _lengths(pools: tuple[Pool, ...], most_s: float) -> list[float]:
    every = {one.seconds for pool in pools for one in pool.options}
    return sorted(one for one in every if one <= most_s + 1e-9)


def _shortest(service: Service, problem: AllocationProblem) -> Mode:
    """Every pool's shortest batch, for a service whose deadline none meets."""

    def shortest(model: str) -> Batches:
        pools = problem.pools_of(model)
        return tuple(min(pool.options, key=lambda one: one.seconds) for pool in pools)

    heavy = shortest(service.heavy.model) if service.heavy else None
    return Mode(shortest(service.first.model), heavy, is_late=True)
