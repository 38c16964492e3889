"""Which requests of a group can be on time together, and which to give up if not all can.

Moore and Hodgson (1968) keep most jobs on time on one machine: go through them by deadline and,
whenever one is late, give up the longest so far. Here the machine is a group of GPUs, the schedule
that of :mod:`ray_cluster.policies.sequence_parallel.fluid`, and the longest the one with the most
GPU-seconds left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ray_cluster.policies.sequence_parallel.fluid import FluidPlan, Work, simulate
from ray_cluster.policies.sequence_parallel.types import ROUNDING_S, GroupView

# no plan of more requests than that comes closer than this to using all GPU-seconds: to count on
# the rest would only have more schedules followed in vain
_CROWD, _CROWD_SHARE = 16, 0.95


@dataclass(frozen=True, slots=True)
class Kept:
    """Requests that can be on time together, by deadline, and their schedule."""

    works: tuple[Work, ...]
    plan: FluidPlan


def keep_most(works: Sequence[Work], view: GroupView) -> Kept:
    """Return as many requests as can be on time together, giving up costly ones first.

    Args:
        works: by deadline, each of which could be on time alone.
    """
    kept = within_demand(works, view)
    plan = best_plan(kept, view)
    while plan.first_late is not None:
        del kept[_last_most([work.widest_gpu_s for work in kept[: plan.first_late + 1]])]
        plan = best_plan(kept, view)
    return Kept(tuple(kept), plan)


def exchange_small(kept: Kept, works: Sequence[Work], view: GroupView) -> Kept:
    """Replace a small kept request by a large one, if all are on time then.

    So as many are kept, and large ones are not given up for being large. Only the first exchange
    that is not ruled out is tried: more keep no more, and take time.

    Args:
        kept: result of :func:`keep_most` for the works.
        works: by deadline.
    """
    rows = {work.row for work in kept.works}
    smallest = min((work.menu.work for work in kept.works), default=math.inf)
    lost = [work for work in works if work.row not in rows and work.menu.work > smallest]
    if not lost:
        return kept
    demands_s = {work.row: least_gpu_s(work, view.now_s) for work in works}
    supplies_s = {work.row: _supply_s(work, view) for work in works}
    for large in sorted(lost, key=lambda work: (-work.menu.work, work.widest_gpu_s)):
        together = sorted((*kept.works, large), key=lambda work: (work.due_s, work.row))
        small = _smallest_to_go(together, large, demands_s, supplies_s)
        if small is not None:
            others = tuple(work for work in together if work is not small)
            plan = best_plan(others, view)
            return Kept(others, plan) if plan.first_late is None else kept
    return kept


def best_plan(works: Sequence[Work], view: GroupView) -> FluidPlan:
    """Return the schedule, narrow or wide, that is late last; narrow if both or none is late."""
    narrow = simulate(works, view.num_gpus, view.now_s, switch_s=view.switch_s, manner="narrow")
    if narrow.first_late is None:
        return narrow
    wide = simulate(works, view.num_gpus, view.now_s, switch_s=view.switch_s, manner="wide")
    if wide.first_late is None or wide.first_late > narrow.first_late:
        return wide
    return narrow


def within_demand(works: Sequence[Work], view: GroupView) -> list[Work]:
    """Return the works less the costliest, until the GPU-seconds due by every deadline exist.

    No schedule fits a set that fails this. In a crowd a little less than what exists is counted on.
    """
    share = _CROWD_SHARE if len(works) > _CROWD else 1.0
    kept: list[Work] = []
    demands_s: list[float] = []
    costs_s: list[float] = []
    total_s = 0.0
    for work in works:
        kept.append(work)
        demands_s.append(least_gpu_s(work, view.now_s))
        costs_s.append(work.widest_gpu_s)
        total_s += demands_s[-1]
        supply_s = share * _supply_s(work, view)
        while total_s > supply_s:
            victim = _last_most(costs_s)
            total_s -= demands_s.pop(victim)
            del kept[victim], costs_s[victim]
    return kept


def _smallest_to_go(
    together: Sequence[Work],
    large: Work,
    demands_s: Mapping[int, float],
    supplies_s: Mapping[int, float],
) -> Work | None:
    """The smallest work without which the GPU-seconds due by every deadline exist.

    None if none smaller than the large one would do.
    """
    totals_s = accumulate(demands_s[work.row] for work in together)
    excesses_s = [
        total_s - supplies_s[work.row] for work, total_s in zip(together, totals_s, strict=True)
    ]
    # requests due after the first overloaded deadline change nothing there
    first = next((row for row, one in enumerate(excesses_s) if one > 0), len(together) - 1)
    # the worst excess at or after each deadline, by which one request must shorten them at least
    worst_s = [-math.inf, *accumulate(excesses_s[:0:-1], max)][::-1]
    fitting = [
        work
        for work, excess_s in zip(together[: first + 1], worst_s, strict=False)
        if work.menu.work < large.menu.work and demands_s[work.row] >= excess_s
    ]
    return min(fitting, key=lambda work: (work.menu.work, -work.widest_gpu_s), default=None)


def least_gpu_s(work: Work, now_s: float) -> float:
    """Return the fewest GPU-seconds in which a request can be on time, whatever others do.

    A mix of two degrees (TetriServe, section 4.2.1).
    """
    frontier = work.menu.frontier
    budget_s = (work.due_s - now_s) / work.steps
    if frontier[0][0] <= budget_s:
        return work.steps * frontier[0][1]
    for (slow_s, narrow), (fast_s, wide) in pairwise(frontier):
        if fast_s <= budget_s:
            return work.steps * (wide + (budget_s - fast_s) * (narrow - wide) / (slow_s - fast_s))
    return work.widest_gpu_s


def _supply_s(work: Work, view: GroupView) -> float:
    """GPU-seconds that there are until a request is due."""
    return view.num_gpus * (work.due_s - view.now_s + ROUNDING_S)


def _last_most(costs_s: Sequence[float]) -> int:
    """The index of the most GPU-seconds; the last of equals."""
    return len(costs_s) - 1 - costs_s[::-1].index(max(costs_s))
