"""What issue and papers ask of the policies, beside what the simulations found.

A headline is one aim; the same figure under other conditions stands beside it, worst first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.policies.figures import Figures, Results
from benchmarks.verdicts import Aim
from ray_cluster.simulator.intervals import Mean

Elsewhere = tuple[tuple[str, Mean], ...]


@dataclass(frozen=True, slots=True)
class Headline:
    """An aim, with the same figure of other experiments.

    Attributes:
        group: what it belongs to.
        experiment: whose figure it is.
        others: the figure under other conditions, by experiment; the first is the worst.
    """

    group: str
    experiment: str
    aim: Aim
    others: Elsewhere = ()


def stated(found: Mean) -> tuple[float, tuple[float, float]]:
    """Return a figure and its interval, as verdicts take them."""
    return found.value, (found.value - found.half_width, found.value + found.half_width)


def elsewhere(
    results: Results,
    names: Iterable[str],
    figure: Callable[[Figures], Mean],
    *,
    highest_first: bool = False,
) -> Elsewhere:
    """Return a figure of other experiments, those that there are; the lowest first."""
    found = [(name, figure(results[name])) for name in names if name in results]
    return tuple(sorted(found, key=lambda one: one[1].value, reverse=highest_first))
