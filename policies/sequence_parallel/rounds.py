"""Which request of a group uses how many GPUs from its next step boundary on.

Whenever a request comes or ends, the whole set is simulated to its end, by deadline. While it can't
be done in time, one request is sacrificed. The others get the smallest degree that meets their
deadlines, and then what is left. A sacrificed request gets GPUs that no other can use, and is back
in as soon as the set allows it.

TetriServe (section 4.2) decides in rounds of a fixed length by a knapsack over the requests that
survive to the next one: :mod:`ray_cluster.policies.baselines.sp_knapsack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ray_cluster.policies.sequence_parallel.admission import exchange_small, keep_most
from ray_cluster.policies.sequence_parallel.fluid import Work
from ray_cluster.policies.sequence_parallel.types import (
    GroupRequest,
    GroupView,
    RoundDecision,
    is_hopeless,
)

# a step in flight whose expected end has passed is expected to end any moment
_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """What an operator may choose.

    Attributes:
        guard: which to sacrifice under overload. ``most`` keeps as many requests as it can, so that
            the largest are given up first; ``large`` keeps as many, and of those as large ones as
            it can, so that no class is starved.
        doubt: a request is dropped once it would be late even if steps were faster than expected by
            this share; before that it counts as sacrificed. Where deadlines leave 2 %, times that
            are wrong by 3 % would drop whole classes.
        drops: whether such requests are given up; else they get what nobody else can use, after
            those that were sacrificed.
    """

    guard: Literal["most", "large"] = "most"
    doubt: float = 0.1
    drops: bool = True


def plan_round(view: GroupView, options: RoundOptions = RoundOptions()) -> RoundDecision:
    """Return the degree of every request; hopeless ones are dropped.

    The decision holds until a request comes or ends: the plan changes at ends only.
    """
    sorted_out = sort_out(view, options.doubt)
    kept = keep_most(sorted_out.hopeful, view)
    if options.guard == "large" and len(kept.works) < len(sorted_out.hopeful):
        kept = exchange_small(kept, sorted_out.hopeful, view)
    degrees = [0] * len(view.requests)
    for work, level in zip(kept.works, kept.plan.levels, strict=True):
        if level >= 0:
            degrees[work.row] = work.menu.degrees[level]
    rows = {work.row for work in kept.works}
    lost = [work for work in sorted_out.hopeful if work.row not in rows]
    late = () if options.drops else sorted_out.late
    sacrificed = (*lost, *sorted_out.doubtful, *late)
    _use_rest(sacrificed, degrees, view.num_gpus)
    return RoundDecision(
        tuple(degrees),
        tuple(view.requests[work.row].request_id for work in sorted_out.late if options.drops),
        tuple(view.requests[work.row].request_id for work in sacrificed),
    )


@dataclass(frozen=True, slots=True)
class SortedOut:
    """The requests of a group by their prospects, each by deadline.

    Attributes:
        hopeful: could be on time alone.
        doubtful: only if steps were faster than expected.
        late: the others.
    """

    hopeful: tuple[Work, ...]
    doubtful: tuple[Work, ...]
    late: tuple[Work, ...]


def sort_out(view: GroupView, doubt: float) -> SortedOut:
    """Return what is left of a group's requests, by their prospects."""
    found: tuple[list[Work], list[Work], list[Work]] = ([], [], [])
    for row, request in enumerate(view.requests):
        is_late = is_hopeless(request, view.now_s)
        is_certain = is_late and is_hopeless(request, view.now_s, doubt=doubt)
        found[is_late + is_certain].append(work_of(row, request, view))
    by_deadline = [sorted(works, key=lambda work: (work.due_s, work.row)) for works in found]
    return SortedOut(*map(tuple, by_deadline))


def work_of(row: int, request: GroupRequest, view: GroupView) -> Work:
    """Return what is left of a request, the step in flight counted by its time."""
    menu, level, steps = request.menu, -1, float(request.steps_left)
    if request.degree:
        level = menu.level_of(request.degree)
        steps += max(request.in_flight_s(view.now_s), _LEAST_S) / menu.step_s[level]
    elif request.has_begun:
        steps += view.switch_s / menu.fastest_s
    return Work(row, menu, steps, request.due_s, level)


def _use_rest(works: Sequence[Work], degrees: list[int], num_gpus: int) -> None:
    """Give GPUs that nobody else uses to sacrificed requests, in their order."""
    free = num_gpus - sum(degrees)
    for work in works:
        level = work.menu.top(free)
        if level >= 0:
            degrees[work.row] = work.menu.degrees[level]
            free -= work.menu.degrees[level]
