"""Degrees that are chosen once, when a request starts, and never changed.

Fixed degrees and menus by resolution are what xDiT and TetriServe's baselines do (TetriServe,
section 6.1). With deadlines in the order and hopeless requests dropped they are the strongest that
can be had without preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ray_cluster.policies.sequence_parallel.types import (
    ROUNDING_S,
    GroupRequest,
    GroupView,
    RoundDecision,
)

Discipline = Literal["fcfs", "edf", "edf_backfill"]


@dataclass(frozen=True, slots=True)
class StaticOptions:
    """A menu and an order.

    Attributes:
        degrees: by class; a class without one takes its largest.
        discipline: by arrival or by deadline; requests behind one that has to wait are passed over
            only with ``edf_backfill``.
        drops: whether a request that would be late if it started now is given up.
    """

    degrees: tuple[tuple[str, int], ...]
    discipline: Discipline = "edf"
    drops: bool = True

    def level(self, request: GroupRequest) -> int:
        """Level of a request's menu: its degree, or the largest that the menu has below it."""
        degree = dict(self.degrees).get(request.menu.slo_class, request.menu.degrees[-1])
        return max(0, request.menu.top(degree))


def plan_static(view: GroupView, options: StaticOptions) -> RoundDecision:
    """Start waiting requests at their class's degree, in the order of the discipline."""
    degrees = [request.degree for request in view.requests]
    free = view.num_gpus - sum(degrees)
    dropped: list[int] = []
    blocked = False
    for row in _waiting(view, options.discipline):
        request = view.requests[row]
        level = options.level(request)
        if options.drops and request.finish_s(level, view.now_s) > request.due_s + ROUNDING_S:
            dropped.append(request.request_id)
            continue
        degree = request.menu.degrees[level]
        if degree <= free and not blocked:
            degrees[row] = degree
            free -= degree
        else:
            blocked = options.discipline != "edf_backfill"
    return RoundDecision(tuple(degrees), tuple(dropped))


def plan_moldable(view: GroupView) -> RoundDecision:
    """Start waiting requests by deadline, at the smallest degree that meets it; drop the hopeless.

    Who can't have the degree that it needs waits, and everybody behind it.
    """
    degrees = [request.degree for request in view.requests]
    free = view.num_gpus - sum(degrees)
    dropped: list[int] = []
    for row in _waiting(view, "edf"):
        request = view.requests[row]
        level = _need(request, view.now_s)
        if level is None:
            dropped.append(request.request_id)
            continue
        degree = request.menu.degrees[level]
        if degree > free:
            # nothing is left for those behind it
            free = 0
            continue
        degrees[row] = degree
        free -= degree
    return RoundDecision(tuple(degrees), tuple(dropped))


def _need(request: GroupRequest, now_s: float) -> int | None:
    """The lowest level at which a request that starts now is on time; None if it can't be."""
    levels = range(len(request.menu.degrees))
    return next(
        (level for level in levels if request.finish_s(level, now_s) <= request.due_s + ROUNDING_S),
        None,
    )


def _waiting(view: GroupView, discipline: Discipline) -> Iterator[int]:
    """Places of the requests that hold no GPUs, in the order of a discipline."""
    rows = [row for row, request in enumerate(view.requests) if not request.degree]
    if discipline == "fcfs":
        yield from sorted(rows, key=lambda row: (view.requests[row].arrival_s, row))
    else:
        yield from sorted(rows, key=lambda row: (view.requests[row].due_s, row))
