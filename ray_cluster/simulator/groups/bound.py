"""An upper bound of the requests that any scheduler could have on time, knowing all arrivals.

A relaxation: requests are fluids that change their degree at no cost and at any instant, so that
between neighbouring arrivals and deadlines only seconds at each degree matter. Requests whose
windows overlap form components that are solved separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

from ortools.math_opt.python import mathopt

from ray_cluster.simulator.groups.group import GroupTask

_ROUNDING = 1e-6
_SOLVE_S = 20.0


@dataclass(frozen=True, slots=True)
class Bound:
    """How many can be on time.

    Attributes:
        is_proven: whether every component was solved to optimality, not only bounded.
    """

    num_on_time: int
    is_proven: bool


def bound_on_time(tasks: Sequence[GroupTask], num_gpus: int) -> Bound:
    """Return an upper bound of the requests that a group can have done on time."""
    total, proven = 0, True
    for component in components_of(tasks):
        solved = _solve(component, num_gpus)
        total += solved.num_on_time
        proven = proven and solved.is_proven
    return Bound(total, proven)


def components_of(tasks: Sequence[GroupTask]) -> list[list[GroupTask]]:
    """Return requests in groups whose windows, from arrival to deadline, do not overlap.

    A request that would be late alone is in none.
    """
    components: list[list[GroupTask]] = []
    end_s = -1.0
    for task in sorted(tasks, key=lambda one: one.arrival_s):
        due_s = _due_s(task)
        if task.arrival_s + task.pace[-1] * task.true_step_s[-1] > due_s + _ROUNDING:
            continue
        if not components or task.arrival_s >= end_s:
            components.append([])
        components[-1].append(task)
        end_s = max(end_s, due_s)
    return components


def _solve(tasks: Sequence[GroupTask], num_gpus: int) -> Bound:
    if len(tasks) == 1:
        return Bound(1, True)
    program = _Program(tasks, num_gpus)
    if program.can_all_be_on_time():
        return Bound(len(tasks), True)
    return program.most_on_time()


@dataclass(frozen=True, slots=True)
class _Service:
    """Seconds that a request is served at a degree between two neighbouring instants."""

    request: int
    degree: int
    whole_s: float
    seconds: mathopt.Variable


class _Program:
    """The mixed-integer program of one component."""

    def __init__(self, tasks: Sequence[GroupTask], num_gpus: int) -> None:
        self._tasks, self._num_gpus = tasks, num_gpus
        self._model = mathopt.Model()
        # variables: whether each request is on time
        self._accepted = [self._model.add_binary_variable() for _ in tasks]
        served: list[_Service] = []
        for begin_s, end_s in pairwise(_instants(tasks)):
            services = list(self._services(begin_s, end_s))
            self._limit_span(services, end_s - begin_s)
            served += services
        self._require_steps(served)
        self._model.maximize(mathopt.LinearSum(self._accepted))

    def can_all_be_on_time(self) -> bool:
        """Whether all are: a linear program, which settles most components."""
        self._relax(least=1.0, is_integer=False)
        result = mathopt.solve(self._model, mathopt.SolverType.GLOP)
        self._relax(least=0.0, is_integer=True)
        return bool(result.termination.reason == mathopt.TerminationReason.OPTIMAL)

    def most_on_time(self) -> Bound:
        """How many are, at most."""
        parameters = mathopt.SolveParameters(time_limit=timedelta(seconds=_SOLVE_S), threads=1)
        result = mathopt.solve(self._model, mathopt.SolverType.GSCIP, params=parameters)
        proven = result.termination.reason == mathopt.TerminationReason.OPTIMAL
        bound = result.termination.objective_bounds.dual_bound
        return Bound(min(len(self._tasks), math.floor(bound + _ROUNDING)), proven)

    def _relax(self, *, least: float, is_integer: bool) -> None:
        for variable in self._accepted:
            variable.lower_bound, variable.integer = least, is_integer

    def _services(self, begin_s: float, end_s: float) -> Iterator[_Service]:
        """Variables: seconds of the requests that have come and are not due, at each degree."""
        for number, task in enumerate(self._tasks):
            if not task.arrival_s <= begin_s < _due_s(task):
                continue
            for degree, step_s in zip(task.menu.degrees, task.true_step_s, strict=True):
                if degree <= self._num_gpus:
                    seconds = self._model.add_variable(lb=0.0, ub=end_s - begin_s)
                    yield _Service(number, degree, step_s * task.pace[-1], seconds)

    def _require_steps(self, served: Sequence[_Service]) -> None:
        """A request that is on time has had all of its steps."""
        for number, accepted in enumerate(self._accepted):
            shares = [one.seconds / one.whole_s for one in served if one.request == number]
            self._model.add_linear_constraint(accepted <= mathopt.LinearSum(shares))

    def _limit_span(self, services: Sequence[_Service], span_s: float) -> None:
        """GPU-seconds between two instants, each request's seconds, and room beside gangs."""
        used = mathopt.LinearSum([one.degree * one.seconds for one in services])
        self._model.add_linear_constraint(used <= self._num_gpus * span_s)
        for number in {one.request for one in services}:
            own = [one.seconds for one in services if one.request == number]
            self._model.add_linear_constraint(mathopt.LinearSum(own) <= span_s)
            self._cut_gangs(services, number, span_s)

    def _cut_gangs(self, services: Sequence[_Service], number: int, span_s: float) -> None:
        """Room that gangs of a power of two leave beside one request.

        At any instant the others' degrees in whole gangs, and its own rounded up, do not exceed
        all gangs there are: if it holds less than a gang, others hold less than all GPUs.
        """
        gang = 2
        while self._num_gpus % gang == 0:
            gangs = [
                (-(-one.degree // gang) if one.request == number else one.degree // gang)
                * one.seconds
                for one in services
            ]
            self._model.add_linear_constraint(
                mathopt.LinearSum(gangs) <= self._num_gpus // gang * span_s
            )
            gang *= 2


def _instants(tasks: Sequence[GroupTask]) -> list[float]:
    """Arrivals and deadlines: between two neighbours nothing comes and nothing is due."""
    return sorted({task.arrival_s for task in tasks} | {_due_s(task) for task in tasks})


def _due_s(task: GroupTask) -> float:
    return task.deadline_s - task.menu.tail_s
