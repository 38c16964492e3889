"""Figures of several policies on the same seeds: means, their intervals, and paired differences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
from scipy import stats


class Row(Protocol):
    """Figures of one policy on one seed."""

    @property
    def policy(self) -> str:
        """The policy's name."""

    @property
    def seed(self) -> int:
        """The seed."""


R = TypeVar("R", bound=Row)


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


@dataclass(frozen=True, slots=True)
class Comparison(Generic[R]):
    """Rows of several policies on the same seeds."""

    rows: tuple[R, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """Names in the order of the rows."""
        return tuple(dict.fromkeys(row.policy for row in self.rows))

    def by_seed(self, policy: str, figure: str) -> dict[int, float]:
        """Return a figure of a policy, an attribute of the rows, by seed."""
        return {row.seed: float(getattr(row, figure)) for row in self.rows if row.policy == policy}

    def estimates(self, figure: str) -> dict[str, Estimate]:
        """Return the mean of a figure over the seeds, by policy."""
        return {
            policy: estimate(list(self.by_seed(policy, figure).values()))
            for policy in self.policies
        }

    def differences(self, figure: str, ours: str = "ours") -> dict[str, Estimate]:
        """Return ours less each other policy's, seed by seed."""
        mine = self.by_seed(ours, figure)
        return {
            policy: paired_difference(mine, self.by_seed(policy, figure))
            for policy in self.policies
            if policy != ours
        }
