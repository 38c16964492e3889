"""Rounds of a fixed length, each a knapsack over the requests that survive to the next one.

TetriServe's published policy, unchanged: the mix of two degrees with the fewest GPU-seconds
(section 4.2.1), Algorithm 1 (4.2.2), what is left to those it did not choose, and elastic scale-up
(4.2.3). Placement preservation is the executor's. Its ties go to fewer GPUs, and it counts every
request as if it had all GPUs to itself from the next round on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, NamedTuple

from ray_cluster.policies.sequence_parallel.types import (
    ROUNDING_S,
    GroupRequest,
    GroupView,
    RoundDecision,
    is_hopeless,
)

Clocking = Literal["grid", "idle", "events"]


@dataclass(frozen=True, slots=True)
class KnapsackOptions:
    """How long a round is, and when one begins.

    Attributes:
        clocking: ``grid`` begins rounds at multiples of their length, as published; ``idle`` also
            at once when nothing runs, counting from there; ``events`` whenever anything comes or
            ends.
    """

    round_s: float
    clocking: Clocking = "grid"


class Allocation(NamedTuple):
    """Steps that a request would take at one level of its menu."""

    level: int
    steps: float


class Option(NamedTuple):
    """What a round may do with a request: GPUs it takes, and whether the request survives."""

    level: int
    width: int
    survives: bool


def plan_knapsack(view: GroupView, options: KnapsackOptions) -> RoundDecision:
    """Return the degrees of the round that begins now, or keep those of the one under way."""
    next_s = _next_round_s(view, options)
    if next_s is None:
        return _keep(view, options)
    live = [
        row for row, request in enumerate(view.requests) if not is_hopeless(request, view.now_s)
    ]
    requests = [view.requests[row] for row in live]
    mixes = [cheapest_mix(one, view.now_s) for one in requests]
    offered = [
        options_of(one, mix, view.now_s, options.round_s)
        for one, mix in zip(requests, mixes, strict=True)
    ]
    levels = choose_options(offered, view.num_gpus)
    free = view.num_gpus - sum(
        one.menu.degrees[level] for one, level in zip(requests, levels, strict=True) if level >= 0
    )
    free = _fill(requests, mixes, levels, free)
    _scale_up(requests, levels, free)
    degrees = [0] * len(view.requests)
    for row, level in zip(live, levels, strict=True):
        degrees[row] = view.requests[row].menu.degrees[level] if level >= 0 else 0
    dropped = tuple(one.request_id for row, one in enumerate(view.requests) if row not in set(live))
    return RoundDecision(tuple(degrees), dropped, look_again_s=next_s)


def _next_round_s(view: GroupView, options: KnapsackOptions) -> float | None:
    """When the round after the one that begins now does; None if none begins."""
    number = math.floor(view.now_s / options.round_s + ROUNDING_S)
    if options.clocking == "grid":
        on_grid = abs(view.now_s - number * options.round_s) <= ROUNDING_S
        return (number + 1) * options.round_s if on_grid else None
    is_idle = not any(one.degree or one.target for one in view.requests)
    is_due = view.now_s >= view.look_again_s - ROUNDING_S
    begins = options.clocking == "events" or is_idle or is_due
    return view.now_s + options.round_s if begins else None


def _keep(view: GroupView, options: KnapsackOptions) -> RoundDecision:
    edge_s = view.look_again_s
    if options.clocking == "grid":
        number = math.floor(view.now_s / options.round_s + ROUNDING_S)
        edge_s = (number + 1) * options.round_s
    return RoundDecision(tuple(one.target for one in view.requests), look_again_s=edge_s)


def cheapest_mix(request: GroupRequest, now_s: float) -> tuple[Allocation, ...]:
    """Return the allocations at one or two degrees that meet the deadline in fewest GPU-seconds."""
    step_s, degrees, steps = request.menu.step_s, request.menu.degrees, request.steps_left
    budget_s = request.due_s - now_s - request.in_flight_s(now_s) + ROUNDING_S
    best: tuple[Allocation, ...] = (Allocation(len(degrees) - 1, steps),)
    best_gpu_s = math.inf
    for level, seconds in enumerate(step_s):
        if steps * seconds <= budget_s and steps * seconds * degrees[level] < best_gpu_s:
            best_gpu_s = steps * seconds * degrees[level]
            best = (Allocation(level, steps),)
    for low, high in combinations(range(len(degrees)), 2):
        slow, fast = step_s[low], step_s[high]
        num_slow = min(steps - 1, math.floor((budget_s - steps * fast) / (slow - fast)))
        if num_slow < 1:
            continue
        num_fast = steps - num_slow
        gpu_s = num_slow * slow * degrees[low] + num_fast * fast * degrees[high]
        if gpu_s < best_gpu_s - ROUNDING_S:
            best_gpu_s = gpu_s
            best = (Allocation(low, num_slow), Allocation(high, num_fast))
    return best


def options_of(
    request: GroupRequest, mix: Sequence[Allocation], now_s: float, round_s: float
) -> tuple[Option, ...]:
    """Return what a round may do with a request, ``none`` (a level of -1) first.

    As published, one that ends within the round but is due before the round's end does not survive.
    """
    free_s = now_s + request.in_flight_s(now_s)
    next_s = now_s + round_s

    def survives(steps_left: float) -> bool:
        bound_s = max(next_s, free_s) + steps_left * request.menu.fastest_s
        return bound_s <= request.due_s + ROUNDING_S

    offered = [Option(-1, 0, survives(request.steps_left))]
    for allocation in mix:
        step_s = request.menu.step_s[allocation.level]
        num_steps = min(allocation.steps, math.floor(round_s / step_s + ROUNDING_S))
        if num_steps > 0:
            width = request.menu.degrees[allocation.level]
            left = request.steps_left - num_steps
            offered.append(Option(allocation.level, width, survives(left)))
    return tuple(offered)


def choose_options(offered: Sequence[Sequence[Option]], num_gpus: int) -> list[int]:
    """Return the level by request with which most survive; of equals, the first offered.

    A group knapsack: at most one option per request, so many GPUs in all.
    """
    values = [0] * (num_gpus + 1)
    picks: list[list[Option]] = []
    for some in offered:
        nexts, row = [-1] * (num_gpus + 1), [some[0]] * (num_gpus + 1)
        for capacity in range(num_gpus + 1):
            for option in some:
                if option.width <= capacity:
                    value = values[capacity - option.width] + option.survives
                    if value > nexts[capacity]:
                        nexts[capacity], row[capacity] = value, option
        values = nexts
        picks.append(row)
    capacity = values.index(max(values))
    levels = [-1] * len(offered)
    for number in range(len(offered) - 1, -1, -1):
        option = picks[number][capacity]
        levels[number] = option.level
        capacity -= option.width
    return levels


def _fill(
    requests: Sequence[GroupRequest],
    mixes: Sequence[Sequence[Allocation]],
    levels: list[int],
    free: int,
) -> int:
    """Give what is left to requests that were not chosen, by deadline; return what still is."""
    for number in sorted(range(len(requests)), key=lambda one: requests[one].due_s):
        if levels[number] >= 0:
            continue
        degrees = requests[number].menu.degrees
        fitting = [one.level for one in mixes[number] if degrees[one.level] <= free]
        level = max(fitting, default=requests[number].menu.top(free))
        if level >= 0:
            levels[number] = level
            free -= degrees[level]
    return free


def _scale_up(requests: Sequence[GroupRequest], levels: list[int], free: int) -> None:
    """Widen those that gain most, as long as there are GPUs for it."""
    while free:
        gains = [
            (requests[number].steps_left * (menu.step_s[level] - menu.step_s[level + 1]), number)
            for number, level in enumerate(levels)
            if 0 <= level < len((menu := requests[number].menu).degrees) - 1
            and menu.degrees[level + 1] - menu.degrees[level] <= free
        ]
        if not gains:
            return
        _, number = max(gains)
        degrees = requests[number].menu.degrees
        free -= degrees[levels[number] + 1] - degrees[levels[number]]
        levels[number] += 1
