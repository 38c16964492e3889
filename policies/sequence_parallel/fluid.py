"""What would happen without further arrivals: requests as fluids that share a group of GPUs.

From one finish to the next each request is served at a degree of its menu; work left is a real
number of steps, and a change takes effect at once. In the ``narrow`` manner a request takes the
smallest degree that meets its deadline if it keeps it, and GPUs that are left widen requests in
their order. In the ``wide`` manner each takes as many GPUs as it can use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ray_cluster.policies.sequence_parallel.types import ROUNDING_S, DegreeMenu

Manner = Literal["narrow", "wide"]


class Work(NamedTuple):
    """What is left of one request.

    Attributes:
        row: index of the request in the caller's view.
        steps: left, with the part of the step in flight and, for a paused request, the cost to
            resume.
        due_s: instant by which they should be done.
        level: of its menu, at which it runs now; -1 while it waits.
    """

    row: int
    menu: DegreeMenu
    steps: float
    due_s: float
    level: int = -1

    @property
    def widest_gpu_s(self) -> float:
        return self.steps * self.menu.step_s[-1] * self.menu.degrees[-1]


@dataclass(frozen=True, slots=True)
class FluidPlan:
    """How a set of requests would be served.

    Attributes:
        levels: at which each is served at first; -1 for those that wait.
        first_late: index of the first request in the order that misses its deadline, if one does.
    """

    levels: tuple[int, ...]
    first_late: int | None


def simulate(
    works: Sequence[Work], num_gpus: int, now_s: float, *, switch_s: float, manner: Manner
) -> FluidPlan:
    """Serve requests in their order until they are done, and say which is late.

    Once one is late only those before it go on: later ones can't have delayed it.
    """
    if manner == "wide" and all(work.menu.degrees[-1] == num_gpus for work in works):
        return _serve_in_turn(works, now_s, switch_s)
    menus, dues_s = [work.menu for work in works], [work.due_s for work in works]
    lefts, levels = [work.steps for work in works], [work.level for work in works]
    alive = list(range(len(works)))
    first: dict[int, int] | None = None
    first_late: int | None = None
    time_s = now_s
    while alive:
        late: int | None = None
        if manner == "narrow":
            granted, late = _grant_narrow(menus, lefts, dues_s, alive, num_gpus, time_s)
        else:
            granted = grant_wide(menus, alive, num_gpus)
        if first is None:
            first = granted
        if not granted:
            # there is no GPU at all that anybody could use
            first_late = alive[0]
            break
        if late is None:
            span_s, done = _serve_until_one_ends(menus, granted, lefts, levels, switch_s)
            time_s += span_s
            for number in done:
                alive.remove(number)
                if late is None and time_s > dues_s[number] + ROUNDING_S:
                    late = number
        if late is not None:
            first_late = late
            alive = [number for number in alive if number < late]
    first = first or {}
    return FluidPlan(tuple(first.get(number, -1) for number in range(len(works))), first_late)


def _serve_in_turn(works: Sequence[Work], now_s: float, switch_s: float) -> FluidPlan:
    """The wide manner where every request can use all GPUs: one after the other."""
    levels = [-1] * len(works)
    time_s = now_s
    for number, work in enumerate(works):
        widest = len(work.menu.degrees) - 1
        levels[number] = -1 if number else widest
        time_s += work.steps * work.menu.step_s[-1] + switch_s * (0 <= work.level < widest)
        if time_s > work.due_s + ROUNDING_S:
            return FluidPlan(tuple(levels), number)
    return FluidPlan(tuple(levels), None)


def _serve_until_one_ends(
    menus: Sequence[DegreeMenu],
    granted: dict[int, int],
    lefts: list[float],
    levels: list[int],
    switch_s: float,
) -> tuple[float, list[int]]:
    """Serve until a request is done; return the seconds and which are done.

    A change of level adds work first.
    """
    served = []
    lefts_s = []
    for number, level in granted.items():
        step_s = menus[number].step_s[level]
        left_s = lefts[number] * step_s
        if level != levels[number]:
            if levels[number] >= 0:
                left_s += switch_s
            levels[number] = level
        served.append((number, step_s))
        lefts_s.append(left_s)
    span_s = min(lefts_s)
    done = []
    for (number, step_s), left_s in zip(served, lefts_s, strict=True):
        rest_s = left_s - span_s
        if rest_s <= ROUNDING_S:
            done.append(number)
        lefts[number] = rest_s / step_s
    return span_s, done


def _grant_narrow(
    menus: Sequence[DegreeMenu],
    lefts: Sequence[float],
    dues_s: Sequence[float],
    order: Sequence[int],
    num_gpus: int,
    now_s: float,
) -> tuple[dict[int, int], int | None]:
    """Return levels by number: the least that meet the deadlines, then widened by what is left.

    And the first request whose deadline no level meets, if there is one; later ones then have
    nothing.
    """
    free = num_gpus
    granted: dict[int, int] = {}
    for number in order:
        menu = menus[number]
        tops = menu.top_by_free
        top = tops[free] if free < len(tops) else tops[-1]
        if top < 0:
            continue
        step_s, left, budget_s = menu.step_s, lefts[number], dues_s[number] - now_s + ROUNDING_S
        level = 0
        while level < top and step_s[level] * left > budget_s:
            level += 1
        granted[number] = level
        if level == top and step_s[-1] * left > budget_s:
            return granted, number
        free -= menu.degrees[level]
        if not free:
            return granted, None
    _widen(menus, granted, free)
    return granted, None


def _widen(menus: Sequence[DegreeMenu], granted: dict[int, int], free: int) -> None:
    """Raise levels, in the order of the requests, by the free GPUs."""
    for number, level in granted.items():
        if not free:
            break
        degrees = menus[number].degrees
        wider = menus[number].top(free + degrees[level])
        if wider > level:
            granted[number] = wider
            free -= degrees[wider] - degrees[level]


def grant_wide(menus: Sequence[DegreeMenu], order: Sequence[int], num_gpus: int) -> dict[int, int]:
    """Return levels by number: the largest that fit, one request after the other."""
    free = num_gpus
    granted: dict[int, int] = {}
    for number in order:
        menu = menus[number]
        top = menu.top(free)
        if top >= 0:
            granted[number] = top
            free -= menu.degrees[top]
            if not free:
                break
    return granted
