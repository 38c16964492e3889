"""Rows of simulations, their means over seeds with 95 % intervals, and paired differences."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        """With so many decimals, and with the interval if there is one."""
        if math.isnan(self.half_width):
            return f"{self.value:.{digits}f}"
        return f"{self.value:.{digits}f} ± {self.half_width:.{digits}f}"

    def times(self, factor: float) -> Mean:
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


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one seed.

    Attributes:
        load: rate, replay speed or condition; None where an experiment has only one.
        figures: by name; shares are from 0 to 1.
        by_class: share of each class's requests that was on time.
    """

    policy: str
    seed: int
    figures: Mapping[str, float]
    load: Any = None
    by_class: Mapping[str, float] = field(default_factory=dict)


class Rows:
    """The rows of an experiment, by policy and load, in the order of the seeds."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: defaultdict[tuple[str, Any], list[Any]] = defaultdict(list)
        for row in sorted(rows, key=lambda one: one.seed):
            self._rows[row.policy, row.load].append(row)

    def of(self, policy: str, load: Any = None) -> list[Any]:
        return self._rows[policy, load]

    def samples(self, figure: str, policy: str, loads: Sequence[Any] = (None,)) -> list[float]:
        """Return one value per seed: a figure's mean over loads."""
        by_load = [[row.figures[figure] for row in self.of(policy, load)] for load in loads]
        return [math.fsum(values) / len(loads) for values in zip(*by_load, strict=True)]

    def mean(self, figure: str, policy: str, loads: Sequence[Any] = (None,)) -> Mean:
        """Return a figure's mean over seeds (and loads)."""
        return mean_of(self.samples(figure, policy, loads))

    def gain(self, figure: str, first: str, second: str, loads: Sequence[Any] = (None,)) -> Mean:
        """Return by how much the first policy's figure is higher, paired by seed."""
        return paired_difference(
            self.samples(figure, first, loads), self.samples(figure, second, loads)
        )

    def class_means(
        self, policy: str, load: Any, *, if_absent: float | None = None
    ) -> dict[str, Mean]:
        """Return the share on time of each class.

        Args:
            policy: whose.
            load: at which.
            if_absent: what a seed counts as in which no request of a class came; left out if None.
        """
        rows = self.of(policy, load)
        found = {}
        for name in dict.fromkeys(name for row in rows for name in row.by_class):
            shares = [row.by_class.get(name, if_absent) for row in rows]
            found[name] = mean_of([share for share in shares if share is not None])
        return found
