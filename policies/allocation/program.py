"""The mixed-integer program of an allocation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from ortools.sat.python import cp_model

from ray_cluster.policies.allocation.modes import Mode
from ray_cluster.policies.allocation.problem import (
    AllocationProblem,
    BatchOption,
    Pool,
    Service,
    Stage,
)
from ray_cluster.policies.allocation.variables import (
    THOUSAND,
    Level,
    Linear,
    ModeChoice,
    Requests,
    Solution,
    Term,
    gain_points,
    merged,
    part_of,
    rate_of_started,
    units_per_s,
)

# costs are counted in tenths of a price
_TENTHS = 10


@dataclass(slots=True)
class _Sums:
    """Terms of the objective, collected while constraints are written."""

    quality: list[Linear] = field(default_factory=list)
    most_quality: int = 0
    surge: list[Linear] = field(default_factory=list)
    most_surge: int = 0
    most_unserved: int = 0


class AllocationModel:
    """One problem as a program for CP-SAT.

    Attributes:
        terms: of every pool, one for each mode in which it can meet the deadline.
        choices: modes of every service.
        deferred: deferral rate of every cascade, in thousandths.
        unserved: of every stage of a service, in its units, where that is allowed.
        units: whole units of every service's rates in one request per second.
        is_refuted: whether the last search proved that there is no solution.

    Args:
        problem: what to allocate.
        modes: of every service, by its name.
        allows_unserved: whether demand may stay unserved, which is then the first objective.
    """

    def __init__(
        self,
        problem: AllocationProblem,
        modes: Mapping[str, tuple[Mode, ...]],
        *,
        allows_unserved: bool = False,
    ) -> None:
        self.problem = problem
        self._modes = modes
        self._allows_unserved = allows_unserved
        self._cp = cp_model.CpModel()
        self.terms: dict[str, list[Term]] = defaultdict(list)
        self.deferred: dict[str, cp_model.IntVar] = {}
        self.choices: dict[str, list[ModeChoice]] = {}
        self.unserved: list[tuple[Service, Stage, cp_model.IntVar]] = []
        self.is_refuted = False
        self._sums = _Sums()
        # units of a model beyond which nobody needs any, however much is deferred
        self._most_useful: dict[str, int] = {}
        self.units = {one.name: units_per_s(one, problem) for one in problem.services}
        for service in problem.services:
            self._add_service(service)
        self._add_gpus()

    def _add_service(self, service: Service) -> None:
        choices = [
            ModeChoice(mode, self._cp.new_bool_var(f"{service.name}.{number}"))
            for number, mode in enumerate(self._modes[service.name])
        ]
        self.choices[service.name] = choices
        self._cp.add_exactly_one(one.is_chosen for one in choices)
        alone = self._whole(service, service.alone_per_s)
        entering = Requests(self._whole(service, service.demand_per_s) + alone)
        self._add_stage(service, service.first, entering)
        if service.heavy is not None:
            rate = self._add_deferral(service, choices)
            # a whole number but for rounding, for units are made so
            slope = round(service.demand_per_s * self.units[service.name] / THOUSAND)
            direct = self._whole(service, service.direct_per_s)
            load = Requests(direct, slope, rate, most_rate=gain_points(service)[-1][0])
            self._add_stage(service, service.heavy, load)

    def _whole(self, service: Service, amount: float) -> int:
        """Units of a service's requests, rounded up."""
        return math.ceil(amount * self.units[service.name] - 1e-6)

    def _add_stage(self, service: Service, stage: Stage, load: Requests) -> None:
        draining = self._whole(service, stage.num_waiting / self.problem.drain_s)
        needed = replace(load, fixed=load.fixed + draining)
        surge = load.times(service.surge_factor)
        self._most_useful[stage.model] = max(needed.most, surge.most)
        capacity: list[Linear] = [self._capacity(service, stage)]
        if self._allows_unserved:
            unserved = self._cp.new_int_var(0, needed.most, f"{stage.model}.unserved")
            self.unserved.append((service, stage, unserved))
            self._sums.most_unserved += needed.most * service.weight
            capacity.append(unserved)
        self._cp.add(cp_model.LinearExpr.sum(capacity) >= needed.value)
        # where demand itself is not met, surges are no question
        if service.surge_factor > 1 and not self._allows_unserved:
            # the rest is needed anyway
            most = max(0, surge.fixed - needed.fixed, surge.most - needed.most)
            short = self._cp.new_int_var(0, most, f"{stage.model}.short")
            self._cp.add(cp_model.LinearExpr.sum([*capacity, short]) >= surge.value)
            self._sums.surge.append(short)
            self._sums.most_surge += most

    def _capacity(self, service: Service, stage: Stage) -> Linear:
        pools = self.problem.pools_of(stage.model)
        for number, pool in enumerate(pools):
            modes_by_batch: dict[BatchOption, list[cp_model.IntVar]] = defaultdict(list)
            for choice in self.choices[service.name]:
                batch = part_of(choice.mode, service, stage)[number]
                if batch is not None:
                    modes_by_batch[batch].append(choice.is_chosen)
            for batch, modes in modes_by_batch.items():
                self.terms[pool.name].append(self._term(service, pool, batch, modes))
        every = [term.capacity for pool in pools for term in self.terms[pool.name]]
        return sum(every) if every else 0

    def _term(
        self, service: Service, pool: Pool, batch: BatchOption, modes: list[cp_model.IntVar]
    ) -> Term:
        """Replicas at a batch, none unless one of its modes is chosen."""
        name, most = f"{pool.name}.{batch.batch}", self.problem.most_replicas(pool)
        rate = math.floor(batch.rate_per_s * self.units[service.name] + 1e-6)
        starting_counts = pool.lost_share > 0 or self.problem.gain_per_start > 0
        most_kept = min(most, pool.num_replicas) if starting_counts else most
        kept = self._cp.new_int_var(0, most_kept, f"{name}.kept")
        started = rate_of_started(rate, pool)
        # tight bounds make the relaxation tight, and so the proof short
        useful = -(-self._most_useful[pool.model] // started) if started else 0
        most_starts = min(most, max(useful, self.problem.fewest_replicas(pool)))
        starts = self._cp.new_int_var(0, most_starts, f"{name}.starts") if starting_counts else None
        if len(modes) < len(self.choices[service.name]):
            self._cp.add(kept <= most_kept * sum(modes))
            if starts is not None:
                self._cp.add(starts <= most_starts * sum(modes))
        return Term(pool, batch, rate, kept, starts)

    def _add_deferral(self, service: Service, choices: list[ModeChoice]) -> cp_model.IntVar:
        """The deferral rate, and the gain in quality that it allows."""
        points = gain_points(service)
        rate = self._cp.new_int_var(0, points[-1][0], f"{service.name}.rate")
        self.deferred[service.name] = rate
        defers = [one.is_chosen for one in choices if one.mode.defers]
        self._cp.add(rate <= points[-1][0] * sum(defers))
        if len(points) > 1:
            self._add_gain(service, rate, points)
        return rate

    def _add_gain(
        self, service: Service, rate: cp_model.IntVar, points: list[tuple[int, int]]
    ) -> None:
        lowest = min(gain for _, gain in points)
        gain = self._cp.new_int_var(lowest, THOUSAND, f"{service.name}.gain")
        pieces = list(pairwise(points))
        below = [
            (gain - g0) * (r1 - r0) <= (g1 - g0) * (rate - r0) for (r0, g0), (r1, g1) in pieces
        ]
        slopes = [(g1 - g0) / (r1 - r0) for (r0, g0), (r1, g1) in pieces]
        if all(a >= b for a, b in pairwise(slopes)):
            # a concave curve is the lowest of its lines
            for line in below:
                self._cp.add(line)
        else:
            inside = [self._cp.new_bool_var(f"{service.name}.piece") for _ in pieces]
            self._cp.add_exactly_one(inside)
            for line, is_inside, ((r0, _), (r1, _)) in zip(below, inside, pieces, strict=True):
                self._cp.add(line).only_enforce_if(is_inside)
                self._cp.add(rate >= r0).only_enforce_if(is_inside)
                self._cp.add(rate <= r1).only_enforce_if(is_inside)
        self._sums.quality.append(service.weight * gain)
        self._sums.most_quality += service.weight * (THOUSAND - lowest)

    def _add_gpus(self) -> None:
        for supply in self.problem.supplies:
            used = [
                pool.gpus_per_replica * self._replicas(pool)
                for pool in self.problem.pools
                if pool.device == supply.device
            ]
            if used:
                self._cp.add(sum(used) <= supply.num_gpus)
        for pool in self.problem.pools:
            # a pool that no service uses has no terms and gets no replicas
            if not self.terms[pool.name]:
                continue
            if pool.max_replicas is not None:
                self._cp.add(self._replicas(pool) <= pool.max_replicas)
            if pool.min_replicas:
                self._cp.add(self._replicas(pool) >= self.problem.fewest_replicas(pool))
            # in need even a replica that has just come may go
            if not self._allows_unserved and pool.num_young:
                most = self.problem.most_replicas(pool)
                self._cp.add(self._replicas(pool) >= min(pool.num_young, most))

    def _replicas(self, pool: Pool) -> Linear:
        return sum(term.replicas for term in self.terms[pool.name])

    @property
    def _most_replicas(self) -> int:
        """Bound on the replicas of all pools together."""
        least: dict[str, int] = {}
        for pool in self.problem.pools:
            known = least.setdefault(pool.device, pool.gpus_per_replica)
            least[pool.device] = min(known, pool.gpus_per_replica)
        supplies = (one for one in self.problem.supplies if one.device in least)
        return sum(one.num_gpus // least[one.device] for one in supplies)

    def _levels(self) -> list[Level]:
        """What is minimised, the most important first."""
        sums = self._sums
        counted = [term for some in self.terms.values() for term in some if term.starts is not None]
        starts = [one.starts for one in counted if one.starts is not None]
        kept = [one.kept for one in counted]
        penalty = self.problem.gain_per_start
        most_penalty = penalty * self._most_replicas
        unserved = sum(service.weight * var for service, _, var in self.unserved)
        add = cp_model.LinearExpr.sum
        worth = cp_model.LinearExpr.weighted_sum([add(starts), add(sums.quality)], [penalty, -1])
        cost, most_cost = self._cost()
        most_kept = sum(pool.num_replicas for pool in self.problem.pools)
        return [
            Level(unserved, sums.most_unserved),
            Level(worth, most_penalty + sums.most_quality),
            Level(sum(sums.surge), sums.most_surge),
            Level(cost, most_cost),
            # of plans that are as good and as cheap, the one that stops fewest replicas
            Level(-sum(kept), most_kept),
        ]

    def _cost(self) -> tuple[Linear, int]:
        """GPUs by their price, and a started one's again for the time in which it loads."""
        parts: list[Linear] = []
        prices = {one.device: one.price for one in self.problem.supplies}
        for pool in self.problem.pools:
            price = prices[pool.device] * pool.gpus_per_replica * _TENTHS
            for term in self.terms[pool.name]:
                parts.append(price * term.replicas)
                if term.starts is not None:
                    parts.append(math.ceil(price * pool.lost_share) * term.starts)
        most = sum(2 * one.price * _TENTHS * one.num_gpus for one in self.problem.supplies)
        return sum(parts), most

    def solve(self, search_limit: float) -> Solution | None:
        """Return the best solution; None if none exists, or none was found within the limit."""
        *firsts, last = merged(self._levels())
        for level in firsts:
            self._cp.minimize(level.value)
            solution = self._solve(search_limit)
            if solution is None or not solution.is_proven:
                return solution
            self._cp.add(level.value <= solution.solver.value(level.value))
        self._cp.minimize(last.value)
        return self._solve(search_limit)

    def _solve(self, search_limit: float) -> Solution | None:
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.max_deterministic_time = search_limit
        # these make proofs several times shorter for programs of this kind
        solver.parameters.linearization_level = 2
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.symmetry_level = 0
        status = solver.solve(self._cp)
        self.is_refuted = status == cp_model.INFEASIBLE
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return Solution(solver, status == cp_model.OPTIMAL)
