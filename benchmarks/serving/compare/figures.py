"""Attainment over loads and goodput, with intervals.

All contenders had the same traces, so intervals are bootstrapped over traces, the same draws for
all: a difference of two contenders is one of pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.stats import resamples

Floats = npt.NDArray[np.float64]
_LEVEL = (2.5, 97.5)
# a mean of shares may miss the level that it has by the last bit
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def as_dict(self, times: float = 1.0) -> dict[str, float]:
        """Return it as tables have it."""
        return {name: times * end for name, end in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Crossing:
    """A load at which attainment falls through a level.

    Attributes:
        load: the least or largest that was tried if it is not between them.
        bound: where it is then.
    """

    load: float
    bound: Literal["", "below", "above"] = ""

    def __str__(self) -> str:
        return f"{self.bound} {self.load:.2f}".strip()


class Attainments:
    """Shares in time of every contender at every load on every trace.

    Args:
        loads: rising.
        by_contender: [loads, traces] of each.

    Raises:
        ValueError: shapes differ, or loads do not rise.
    """

    def __init__(self, loads: Sequence[float], by_contender: Mapping[str, Floats]) -> None:
        shapes = {array.shape for array in by_contender.values()}
        if len(shapes) != 1 or next(iter(shapes))[0] != len(loads) or list(loads) != sorted(loads):
            raise ValueError(f"{len(loads)} rising loads are needed; given {loads} for {shapes}")
        self.loads = tuple(loads)
        self._by_contender = by_contender
        self._draws = resamples(next(iter(shapes))[1])

    def mean(self, contender: str) -> Floats:
        """Return the mean over traces, [loads]."""
        mean: Floats = self._by_contender[contender].mean(axis=1)
        return mean

    def means(self, contender: str) -> Floats:
        """Return the means of all resamples, [resamples, loads]."""
        drawn: Floats = self._by_contender[contender][:, self._draws].mean(axis=2).T
        return drawn

    def at(self, contender: str, index: int) -> Estimate:
        """Return the attainment at a load."""
        return _estimate(float(self.mean(contender)[index]), self.means(contender)[:, index])

    def gain(self, mine: str, theirs: str, index: int) -> Estimate:
        """Return the difference of two contenders at a load."""
        value = float(self.mean(mine)[index] - self.mean(theirs)[index])
        return _estimate(value, (self.means(mine) - self.means(theirs))[:, index])

    def best(self, contenders: Sequence[str], index: int) -> str:
        """Return the contender with most in time at a load."""
        return max(contenders, key=lambda name: float(self.mean(name)[index]))

    def best_at(self, contenders: Sequence[str], level: float) -> str:
        """Return the contender with that much in time up to the highest load."""
        return max(
            contenders,
            key=lambda name: (self.crossing(name, level).load, float(self.mean(name).mean())),
        )

    def crossing(self, contender: str, level: float) -> Crossing:
        """Return the load at which a contender's mean falls through a level."""
        return crossing(self.loads, self.mean(contender), level)

    def goodput_ratio(self, mine: str, theirs: str, level: float) -> Estimate:
        """Return the ratio of the loads up to which two contenders have that share in time.

        A load that was not reached counts as the end of what was tried.
        """
        value = self.crossing(mine, level).load / self.crossing(theirs, level).load
        samples = [
            crossing(self.loads, a, level).load / crossing(self.loads, b, level).load
            for a, b in zip(self.means(mine), self.means(theirs), strict=True)
        ]
        return _estimate(value, np.array(samples))

    def where(self, theirs: str, level: float, mine: str) -> tuple[Crossing, Estimate]:
        """Return the load at which theirs falls through the level, and what mine has there."""
        found = self.crossing(theirs, level)
        value = float(np.interp(found.load, self.loads, self.mean(mine)))
        samples = [
            np.interp(crossing(self.loads, b, level).load, self.loads, a)
            for a, b in zip(self.means(mine), self.means(theirs), strict=True)
        ]
        return found, _estimate(value, np.array(samples))


def crossing(
    loads: Sequence[float], attainments: Floats | Sequence[float], level: float
) -> Crossing:
    """Return the load at which attainment first falls below a level, linear between loads.

    Args:
        loads: rising.
        attainments: at each of them.
        level: the share that must be in time.
    """
    if attainments[0] < level - _ROUNDING:
        return Crossing(loads[0], "below")
    for index in range(1, len(loads)):
        before, after = float(attainments[index - 1]), float(attainments[index])
        if after < level - _ROUNDING:
            share = max(before - level, 0.0) / (before - after)
            return Crossing(loads[index - 1] + share * (loads[index] - loads[index - 1]))
    return Crossing(loads[-1], "above")


def _estimate(value: float, samples: Floats) -> Estimate:
    low, high = np.percentile(samples, _LEVEL)
    return Estimate(value, float(low), float(high))
