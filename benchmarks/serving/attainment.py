"""Attainment over loads and goodput, with intervals.

All contenders had the same traces, so intervals are bootstrapped over traces, the same draws for
all: a difference of two contenders is one of pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure, resamples

Floats = npt.NDArray[np.float64]
# a mean of shares may miss the level that it has by the last bit
_ROUNDING = 1e-9


class Crossing(NamedTuple):
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
        shares: [loads, traces] of each contender.
    """

    def __init__(self, loads: Sequence[float], shares: Mapping[str, Floats]) -> None:
        self.loads, self._shares = tuple(loads), shares
        self._draws = resamples(next(iter(shares.values())).shape[1])

    def mean(self, contender: str) -> Floats:
        """Return the mean over traces, [loads]."""
        mean: Floats = self._shares[contender].mean(axis=1)
        return mean

    def estimate(self, of: Callable[..., float], *contenders: str) -> Figure:
        """Return a figure of the contenders' attainments, each [loads], with its interval."""
        drawn = [self._shares[name][:, self._draws].mean(axis=2).T for name in contenders]
        samples = [of(*one) for one in zip(*drawn, strict=True)]
        low, high = np.percentile(samples, [2.5, 97.5])
        value = of(*(self.mean(name) for name in contenders))
        return {"value": float(value), "low": float(low), "high": float(high)}

    def at(self, contender: str, index: int) -> Figure:
        """Return the attainment at a load, in percent."""
        return self.estimate(lambda own: 100 * own[index], contender)

    def gain(self, mine: str, theirs: str, index: int) -> Figure:
        """Return the difference of two contenders at a load, in points."""
        return self.estimate(lambda own, other: 100 * (own[index] - other[index]), mine, theirs)

    def best_at(self, contenders: Sequence[str], level: float) -> str:
        """Return the contender with that much in time up to the highest load."""
        return max(
            contenders,
            key=lambda name: (self.crossing(name, level).load, float(self.mean(name).mean())),
        )

    def crossing(self, contender: str, level: float) -> Crossing:
        """Return the load at which a contender's mean falls through a level."""
        return crossing(self.loads, self.mean(contender), level)

    def goodput_ratio(self, mine: str, theirs: str, level: float) -> Figure:
        """Return the ratio of the loads up to which two contenders have that share in time.

        A load that was not reached counts as the end of what was tried.
        """

        def ratio(own: Floats, other: Floats) -> float:
            return crossing(self.loads, own, level).load / crossing(self.loads, other, level).load

        return self.estimate(ratio, mine, theirs)

    def where(self, theirs: str, level: float, mine: str) -> Figure:
        """Return the percentage of mine where theirs falls through the level."""

        def there(other: Floats, own: Floats) -> float:
            load = crossing(self.loads, other, level).load
            return 100 * float(np.interp(load, self.loads, own))

        return self.estimate(there, theirs, mine)


def crossing(
    loads: Sequence[float], attainments: Floats | Sequence[float], level: float
) -> Crossing:
    """Return the load at which attainment first falls below a level, linear between loads."""
    if attainments[0] < level - _ROUNDING:
        return Crossing(loads[0], "below")
    for index in range(1, len(loads)):
        before, after = float(attainments[index - 1]), float(attainments[index])
        if after < level - _ROUNDING:
            share = max(before - level, 0.0) / (before - after)
            return Crossing(loads[index - 1] + share * (loads[index] - loads[index - 1]))
    return Crossing(loads[-1], "above")
