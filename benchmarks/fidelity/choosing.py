"""Which variants are made of held-out prompts: those that did best where they may be chosen."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.fidelity.fewer_plan import BARS
from benchmarks.fidelity.frontier import Frontier, Point
from benchmarks.fidelity.plan import EXACT, FidelityRun, Finalists, Grid, schedules
from benchmarks.fidelity.work import Made


def num_tests(grid: Grid) -> int:
    """Return how many comparisons there are of a model at a size, to correct intervals for."""
    return len(grid.base_steps) * max(len(schedules(model)) for model in grid.models)


def choose(grid: Grid, tuning: Mapping[FidelityRun, Made]) -> Finalists:
    """Return what is reported, of each model at each size: variants, and steps to hold them to.

    At each number of steps these are the variant with the largest gain over fewer steps and the
    cheapest that keeps to each mode; beside them all steps, as many as each of them costs, rounded
    down and up, and the fewest that keep to a mode.

    Args:
        grid: what is measured.
        tuning: the runs to choose by that are there.
    """
    frontier = Frontier(tuning)
    cells: dict[tuple[str, int, int], list[Point]] = defaultdict(list)
    for point in frontier.points(num_tests(grid)):
        cells[point.model, point.px, point.base_steps].append(point)
    found: dict[tuple[str, int], set[tuple[int, str]]] = defaultdict(set)
    for (model, px, base), points in cells.items():
        wanted = found[model, px]
        wanted.add((base, EXACT))
        for point in _best(points):
            wanted.add((base, point.variant))
            wanted |= {(max(1, one), EXACT) for one in _beside(point.cost_steps)}
        for bar in BARS.values():
            fewest = fewest_steps(frontier, (model, px, base), bar)
            wanted |= set() if fewest is None else {(fewest, EXACT)}
    return found


def _best(points: Sequence[Point]) -> Iterator[Point]:
    yield max(points, key=lambda one: one.quality["tuning"].gain)
    for bar in BARS.values():
        cheapest = cheapest_reuse(points, bar)
        if cheapest is not None:
            yield cheapest


def _beside(cost_steps: float) -> tuple[int, int]:
    return math.floor(cost_steps), math.ceil(cost_steps)


def cheapest_reuse(points: Sequence[Point], least: float) -> Point | None:
    """Return what costs least of what has its worst tuning image at a similarity or above."""
    good = [
        one for one in points if "tuning" in one.quality and one.quality["tuning"].worst >= least
    ]
    return min(good, key=lambda one: one.cost_steps, default=None)


def fewest_steps(frontier: Frontier, cell: tuple[str, int, int], least: float) -> int | None:
    """Return the fewest steps of which the same holds beside a model's, size's and number's."""
    tuning = frontier.exact_similarity(*cell, "tuning")
    return min((steps for steps, ssim in tuning.items() if ssim.min() >= least), default=None)
