"""Means over seeds, with the interval in which the true mean lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of a figure over seeds.

    Attributes:
        half_width: of the 95 % interval (Student's t); not a number for a single seed.
        num: seeds.
    """

    value: float
    half_width: float
    num: int

    def as_figures(self) -> dict[str, float | None]:
        """As JSON has it: without what is not a number."""
        half_width = None if math.isnan(self.half_width) else self.half_width
        return {"value": self.value, "half_width": half_width, "num": self.num}

    def as_points(self) -> str:
        """As percentage points, with the interval."""
        return self.times(100).as_text(1)

    def as_text(self, digits: int) -> str:
        """With so many digits behind the point, and with the interval if there is one."""
        if math.isnan(self.half_width):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ± {self.half_width:.{digits}f}"

    def times(self, factor: float) -> Mean:
        """In a unit that is so many times as small."""
        return Mean(factor * self.value, factor * self.half_width, self.num)


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of one value per seed.

    Raises:
        ValueError: there is none.
    """
    if not values:
        raise ValueError("a mean needs at least one value")
    count = len(values)
    if count == 1:
        return Mean(float(values[0]), math.nan, 1)
    error = float(np.std(values, ddof=1)) / math.sqrt(count)
    width = error * float(stats.t.ppf(0.5 + _CONFIDENCE / 2, count - 1))
    return Mean(float(np.mean(values)), width, count)


def paired_difference(mine: Sequence[float], theirs: Sequence[float]) -> Mean:
    """Return the mean difference of two policies on the same seeds, in the same order."""
    return mean_of([a - b for a, b in zip(mine, theirs, strict=True)])
