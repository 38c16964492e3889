"""The best allocation of a small problem, by trying everything there is."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.allocation.problem import (
    AllocationProblem,
    BatchOption,
    Pool,
    Service,
    Stage,
)

# unserved, less quality, requests short in a surge, cost, less kept: all better when lower
Value = tuple[int, int, int, int, int]
Ints = npt.NDArray[np.int64]
Share = tuple[int, BatchOption]


@dataclass(frozen=True)
class Answer:
    value: Value
    counts: tuple[int, ...]


def exact(number: float) -> Fraction:
    return Fraction(number).limit_denominator(10**6)


def units(service: Service, problem: AllocationProblem) -> Fraction:
    """Whole units in a request per second: a cascade's demand has the same in each thousandth."""
    least = min(
        exact(one.rate_per_s)
        for model in service.models
        for pool in problem.pools_of(model)
        for one in pool.options
    )
    demand = exact(service.demand_per_s)
    if service.heavy is None or demand == 0:
        return 1000 / least
    return 1000 * math.ceil(demand / least) / demand


def gains(service: Service) -> Ints:
    """Thousandths of the best gain at every thousandth of a deferral rate up to the best.

    Rounded down between points that are rounded themselves.
    """
    curve = service.quality
    assert curve is not None
    best = max(curve.gains) or 1.0
    knots = zip(curve.deferral_rates, curve.gains, strict=True)
    points = [(round(1000 * rate), round(1000 * one / best)) for rate, one in knots]
    found = [points[0][1]]
    for (r0, g0), (r1, g1) in itertools.pairwise(points):
        found += [g0 + (g1 - g0) * (at - r0) // (r1 - r0) for at in range(r0 + 1, r1 + 1)]
    return np.array(found[: round(1000 * curve.best_rate) + 1])


class Trial:
    """One choice for every pool: how many replicas, which batch."""

    def __init__(self, problem: AllocationProblem, chosen: dict[str, Share]) -> None:
        self.problem = problem
        self.chosen = chosen

    def starts(self, pool: Pool) -> int:
        return max(0, self.chosen[pool.name][0] - pool.num_replicas)

    def used(self, stage: Stage) -> list[Pool]:
        pools = self.problem.pools_of(stage.model)
        return [pool for pool in pools if self.chosen[pool.name][0] > 0]

    def length_s(self, stage: Stage) -> Fraction:
        """Of the longest batch in use; without replicas, of the shortest that there could be."""
        used = [exact(self.chosen[pool.name][1].seconds) for pool in self.used(stage)]
        pools = self.problem.pools_of(stage.model)
        return max(used, default=min(exact(one.seconds) for pool in pools for one in pool.options))

    def capacity(self, stage: Stage, unit: Fraction) -> int:
        """Units per second, with what a replica makes or lacks rounded to the worse."""
        total = 0
        for pool in self.problem.pools_of(stage.model):
            num, batch = self.chosen[pool.name]
            rate = math.floor(unit * exact(batch.rate_per_s))
            total += rate * num - math.ceil(rate * exact(pool.lost_share)) * self.starts(pool)
        return total

    def can_keep(self, service: Service, *, defers: bool) -> bool:
        """Whether the batches are short enough for the deadline."""
        budget_s = exact(service.budget_s)
        first_s = self.length_s(service.first)
        heavy_s = self.length_s(service.heavy) if service.heavy else Fraction(0)
        if defers:
            return first_s + heavy_s <= budget_s
        # images that are not deferred don't mind a heavy model that is too slow
        unused = service.heavy is not None and not self.used(service.heavy)
        return first_s <= budget_s and (heavy_s <= budget_s or unused)

    def value(self, service: Service, *, unserved_allowed: bool) -> Value | None:
        """The best way that the service can go, without cost."""
        gained = gains(service) if service.heavy else np.zeros(1, dtype=np.int64)
        rates = np.arange(len(gained))
        ways = [
            way
            for defers, some in ((False, rates[:1]), (True, rates[1:]))
            if len(some) and self.can_keep(service, defers=defers)
            for way in self.ways(service, some, gained[some])
        ]
        if unserved_allowed:
            # where demand itself is not met, surges are no question
            ways = [(one[0], one[1], 0, *one[3:]) for one in ways]
        return min((one for one in ways if unserved_allowed or one[0] == 0), default=None)

    def ways(self, service: Service, rates: Ints, gained: Ints) -> list[Value]:
        """Unserved, less quality, short in a surge, and no cost yet, at deferral rates."""
        unit = units(service, self.problem)
        demand = unit * exact(service.demand_per_s)
        factor = exact(service.surge_factor)
        alone = math.ceil(unit * exact(service.alone_per_s))
        stages = [(service.first, math.ceil(demand) + alone, 0)]
        if service.heavy:
            direct = math.ceil(unit * exact(service.direct_per_s))
            stages.append((service.heavy, direct, whole(demand / 1000)))
        unserved, short = 0 * rates, 0 * rates
        for stage, fixed, slope in stages:
            capacity = self.capacity(stage, unit)
            queue = math.ceil(unit * stage.num_waiting / exact(self.problem.drain_s))
            lacking = np.maximum(0, fixed + queue + slope * rates - capacity)
            unserved += service.weight * lacking
            surge = math.ceil(fixed * factor) + math.ceil(slope * factor) * rates
            short += np.maximum(0, surge - capacity - lacking) if factor > 1 else 0
        quality = service.weight * gained if service.heavy else 0 * rates
        every = zip(unserved.tolist(), (-quality).tolist(), short.tolist(), strict=True)
        return [(*one, 0, 0) for one in every]

    def is_possible(self, *, keeps_young: bool) -> bool:
        for supply in self.problem.supplies:
            pools = [pool for pool in self.problem.pools if pool.device == supply.device]
            gpus = sum(self.chosen[pool.name][0] * pool.gpus_per_replica for pool in pools)
            if gpus > supply.num_gpus:
                return False
        if any(
            self.chosen[pool.name][0] < min(pool.min_replicas, most_of(pool, self.problem))
            for pool in self.problem.pools
        ):
            return False
        kept = all(
            self.chosen[pool.name][0] >= min(pool.num_young, most_of(pool, self.problem))
            for pool in self.problem.pools
        )
        return kept or not keeps_young

    def cost(self) -> int:
        prices = {one.device: one.price for one in self.problem.supplies}
        total = 0
        for pool in self.problem.pools:
            price = 10 * prices[pool.device] * pool.gpus_per_replica
            loading = math.ceil(price * exact(pool.lost_share))
            total += price * self.chosen[pool.name][0] + loading * self.starts(pool)
        return total

    def kept(self) -> int:
        """Replicas that stay, of pools where starting one costs anything."""
        return sum(
            min(self.chosen[pool.name][0], pool.num_replicas)
            for pool in self.problem.pools
            if pool.lost_share > 0 or self.problem.gain_per_start > 0
        )

    def best(self, *, unserved_allowed: bool) -> Value | None:
        if not self.is_possible(keeps_young=not unserved_allowed):
            return None
        total: Value = (0, 0, 0, self.cost(), -self.kept())
        for service in self.problem.services:
            best = self.value(service, unserved_allowed=unserved_allowed)
            if best is None:
                return None
            total = tuple(a + b for a, b in zip(total, best, strict=True))  # type: ignore[assignment]
        started = sum(self.starts(pool) for pool in self.problem.pools)
        penalty = self.problem.gain_per_start * started
        return total[0], total[1] + penalty, *total[2:]


def whole(number: Fraction) -> int:
    assert number.denominator == 1
    return int(number)


def most_of(pool: Pool, problem: AllocationProblem) -> int:
    gpus = next(one.num_gpus for one in problem.supplies if one.device == pool.device)
    most = gpus // pool.gpus_per_replica
    return most if pool.max_replicas is None else min(most, pool.max_replicas)


def shares_of(pool: Pool, problem: AllocationProblem) -> list[Share]:
    most = most_of(pool, problem)
    # the batch of nobody does not matter
    shares = itertools.product(range(1, most + 1), pool.options)
    return [(0, pool.options[0]), *shares]


def best_by_trying(problem: AllocationProblem, *, unserved_allowed: bool = False) -> Answer | None:
    """The best value, with counts that reach it; None if nothing meets all demands."""
    best: Answer | None = None
    names = [pool.name for pool in problem.pools]
    for shares in itertools.product(*(shares_of(pool, problem) for pool in problem.pools)):
        trial = Trial(problem, dict(zip(names, shares, strict=True)))
        value = trial.best(unserved_allowed=unserved_allowed)
        if value is not None and (best is None or value < best.value):
            best = Answer(value, tuple(num for num, _ in shares))
    return best


def value_of(
    problem: AllocationProblem, counts: tuple[int, ...], *, unserved_allowed: bool = False
) -> Value | None:
    """The best value with these counts, over all batches."""
    every = itertools.product(*(pool.options for pool in problem.pools))
    names = [pool.name for pool in problem.pools]
    values = [
        Trial(problem, dict(zip(names, zip(counts, batches, strict=True), strict=True))).best(
            unserved_allowed=unserved_allowed
        )
        for batches in every
    ]
    return min((one for one in values if one is not None), default=None)
