"""Figures of several policies on the same seeds: means, their intervals, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds, with half the width of its 95 % interval (Student's t)."""

    mean: float
    half_width: float
    num_seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.half_width:.2g}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values; without an interval if there is only one."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, math.inf, len(values))
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, float(stats.t.ppf(0.975, len(values) - 1)) * error, len(values))


def paired_difference(ours: dict[int, float], theirs: dict[int, float]) -> Estimate:
    """Return ours less theirs, seed by seed.

    Raises:
        ValueError: the seeds differ.
    """
    if ours.keys() != theirs.keys():
        raise ValueError(f"not the same seeds: {sorted(ours)} and {sorted(theirs)}")
    return estimate([ours[seed] - theirs[seed] for seed in sorted(ours)])
