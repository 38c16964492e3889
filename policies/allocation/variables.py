"""Variables of an allocation's program, and what they stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ortools.sat.python import cp_model

from ray_cluster.policies.allocation.modes import Batches, Mode
from ray_cluster.policies.allocation.problem import (
    AllocationProblem,
    BatchOption,
    Pool,
    Service,
    Stage,
)

# deferral rates, gains in quality and seconds are counted in thousandths
THOUSAND = 1000
# what CP-SAT's integers of 63 bits hold with something to spare. Bounds beyond 2**53 it compares as
# doubles: in the largest problems a plan may pass for the best that stops a few replicas more than
# one which is as good and as cheap. Another search for these would take as long again
_MOST = 2**60

# OR-Tools has no types; variables and sums of them
Linear = cp_model.LinearExprT


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests for a model, in units: a fixed number, and more with each thousandth deferred.

    Attributes:
        most_rate: thousandths that may be deferred.
    """

    fixed: int
    slope: int = 0
    rate: cp_model.IntVar | None = None
    most_rate: int = 0

    @property
    def value(self) -> Linear:
        return self.fixed if self.rate is None else self.fixed + self.slope * self.rate

    @property
    def most(self) -> int:
        return self.fixed + self.slope * self.most_rate

    def times(self, factor: float) -> Requests:
        """Return so many times as many, rounded up."""
        fixed, slope = (math.ceil(one * factor - 1e-6) for one in (self.fixed, self.slope))
        return replace(self, fixed=fixed, slope=slope)


@dataclass(frozen=True, slots=True)
class Term:
    """Replicas of a pool at one batch: those that stay, and those that start.

    Attributes:
        rate: units per second of a replica.
        starts: None where starting costs nothing, and all count as kept.
    """

    pool: Pool
    batch: BatchOption
    rate: int
    kept: cp_model.IntVar
    starts: cp_model.IntVar | None

    @property
    def replicas(self) -> Linear:
        return self.kept if self.starts is None else self.kept + self.starts

    @property
    def capacity(self) -> Linear:
        """Units per second over the window, in which a started replica first loads."""
        if self.starts is None:
            return self.rate * self.kept
        return self.rate * self.kept + rate_of_started(self.rate, self.pool) * self.starts


@dataclass(frozen=True, slots=True)
class ModeChoice:
    """A mode of a service, with the variable that says whether it is the one."""

    mode: Mode
    is_chosen: cp_model.IntVar


@dataclass(frozen=True, slots=True)
class Solution:
    """Values of the program's variables."""

    solver: cp_model.CpSolver
    is_proven: bool

    def value(self, variable: cp_model.IntVar) -> int:
        return int(self.solver.value(variable))


def rate_of_started(rate: int, pool: Pool) -> int:
    """Units per second over the window of a replica that first loads."""
    return rate - math.ceil(rate * pool.lost_share - 1e-6)


def units_per_s(service: Service, problem: AllocationProblem) -> float:
    """Return the whole units of a service's rates in one request per second.

    The lowest rate has at least a thousand of them, so that rounding changes it by less than a
    thousandth, and a thousandth of a cascade's demand is a whole number.
    """
    rates = [
        one.rate_per_s
        for model in service.models
        for pool in problem.pools_of(model)
        for one in pool.options
    ]
    if service.heavy is None or service.demand_per_s <= 0:
        return THOUSAND / min(rates)
    slope = math.ceil(service.demand_per_s / min(rates))
    return slope * THOUSAND / service.demand_per_s


def gain_points(service: Service) -> list[tuple[int, int]]:
    """Return the points of a cascade's quality up to the best: rate and gain, in thousandths."""
    assert service.quality is not None
    gains, best_rate = service.quality.gains, service.quality.best_rate
    best = max(gains) or 1.0
    return [
        (round(THOUSAND * rate), round(THOUSAND * gain / best))
        for rate, gain in zip(service.quality.deferral_rates, gains, strict=True)
        if rate <= best_rate
    ]


def part_of(mode: Mode, service: Service, stage: Stage) -> Batches:
    """Return a stage's part of its service's mode."""
    part = mode.heavy if stage is service.heavy else mode.first
    assert part is not None
    return part


@dataclass(frozen=True, slots=True)
class Level:
    """One of several objectives, to be minimised before all later ones.

    Attributes:
        most: by how much its values can differ.
    """

    value: Linear
    most: int

    def before(self, after: Level) -> Level:
        """The two as one, in which a unit of this one outweighs all of the latter."""
        weight = after.most + 1
        value = cp_model.LinearExpr.weighted_sum([self.value, after.value], [weight, 1])
        return Level(value, weight * self.most + after.most)


def merged(levels: list[Level]) -> list[Level]:
    """Return the same objectives with neighbours added up as far as integers reach.

    One search is faster than several.
    """
    groups: list[Level] = []
    for level in reversed(levels):
        if level.most == 0:
            continue
        if groups and (level.most + 1) * (groups[-1].most + 1) < _MOST:
            groups[-1] = level.before(groups[-1])
        else:
            groups.append(level)
    return groups[::-1] or [Level(0, 0)]
