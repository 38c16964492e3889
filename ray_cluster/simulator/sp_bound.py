"""How many requests any scheduler could have kept on time, had it known all arrivals.

A relaxation, so an upper bound: requests are fluids that change their degree at no cost and at any
instant. Between neighbouring arrivals and deadlines only seconds at each degree matter. Requests
whose windows overlap form components that are solved by themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from ray_cluster.simulator.groups import GroupTask

_ROUNDING_S = 1e-9
_SOLVE_S = 20.0


class _Variable(NamedTuple):
    """Seconds that a request is served at a level between two instants."""

    request: int
    level: int
    span: int


@dataclass(frozen=True, slots=True)
class Bound:
    """How many can be on time.

    Attributes:
        num_on_time: no scheduler keeps more.
        is_proven: whether every component was solved to the end; else its relaxation stands for it.
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
        due_s = task.deadline_s - task.menu.tail_s
        if task.arrival_s + task.pace[-1] * task.true_step_s[-1] > due_s + _ROUNDING_S:
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
    result = milp(
        program.gains,
        integrality=program.integrality,
        bounds=Bounds(np.zeros(program.size), program.upper),
        constraints=program.constraint(),
        options={"time_limit": _SOLVE_S},
    )
    if result.status == 0:
        return Bound(round(-result.fun), True)
    # the time was up: what the solver has proven so far
    dual = result.mip_dual_bound
    return Bound(len(tasks) if dual is None else min(len(tasks), int(-dual + 1e-6)), False)


class _Program:
    """The mixed-integer program of one component.

    Sets: requests i, levels l of their menus with degree k, spans s between instants.
    Variables: x[i] whether i is on time; y[i, l, s] seconds of i at l within s and i's window.
    """

    def __init__(self, tasks: Sequence[GroupTask], num_gpus: int) -> None:
        self._tasks, self._num_gpus = tasks, num_gpus
        dues = [task.deadline_s - task.menu.tail_s for task in tasks]
        instants = sorted({*(task.arrival_s for task in tasks), *dues})
        self._spans_s = np.diff(instants)
        self._served = [
            _Variable(number, level, span)
            for number, (task, due_s) in enumerate(zip(tasks, dues, strict=True))
            for span, begin_s in enumerate(instants[:-1])
            if task.arrival_s <= begin_s < due_s
            for level in range(len(task.menu.degrees))
            if task.menu.degrees[level] <= num_gpus
        ]
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._most: list[float] = []
        self.size = len(tasks) + len(self._served)
        self.gains = np.zeros(self.size)
        self.gains[: len(tasks)] = -1
        self.integrality = (self.gains < 0).astype(int)
        self.upper = np.concatenate(
            [np.ones(len(tasks)), [self._spans_s[one.span] for one in self._served]]
        )
        self._demand_rows()
        self._supply_rows()

    def constraint(self) -> LinearConstraint:
        """Return all rows, each with a most and no least."""
        shape = (len(self._most), self.size)
        matrix = coo_array((self._values, (self._rows, self._columns)), shape=shape)
        return LinearConstraint(matrix.tocsr(), ub=np.array(self._most))

    def _add(self, coefficients: dict[int, float], most: float) -> None:
        self._rows += [len(self._most)] * len(coefficients)
        self._columns += coefficients.keys()
        self._values += coefficients.values()
        self._most.append(most)

    def _demand_rows(self) -> None:
        """A request that is on time has had all of its steps: x[i] <= sum of y / seconds."""
        rows: list[dict[int, float]] = [{number: 1.0} for number in range(len(self._tasks))]
        for place, one in enumerate(self._served, start=len(self._tasks)):
            task = self._tasks[one.request]
            whole_s = task.true_step_s[one.level] * task.pace[-1]
            rows[one.request][place] = -1 / whole_s
        for row in rows:
            self._add(row, 0.0)

    def _supply_rows(self) -> None:
        """GPU-seconds of a span; seconds of a request in it; and what gangs leave room for.

        Cut for a power of two k and a request i: at any instant the others' degrees in whole
        multiples of k, and i's rounded up, do not exceed N / k: if i holds less than k, others hold
        less than N, and so at most N / k - 1 multiples.
        """
        for span, seconds in enumerate(self._spans_s):
            inside = [
                (place, one.request, self._tasks[one.request].menu.degrees[one.level])
                for place, one in enumerate(self._served, start=len(self._tasks))
                if one.span == span
            ]
            self._add({place: degree for place, _, degree in inside}, self._num_gpus * seconds)
            for request in {request for _, request, _ in inside}:
                own = {place: 1.0 for place, other, _ in inside if other == request}
                self._add(own, seconds)
                self._gang_rows(inside, request, seconds)

    def _gang_rows(
        self, inside: Sequence[tuple[int, int, int]], request: int, seconds: float
    ) -> None:
        gang = 2
        while gang <= self._num_gpus:
            if self._num_gpus % gang == 0:
                weights = {
                    place: float(-(-degree // gang) if other == request else degree // gang)
                    for place, other, degree in inside
                    if other == request or degree >= gang
                }
                self._add(weights, self._num_gpus // gang * seconds)
            gang *= 2
