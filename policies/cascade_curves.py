"""What is known of a cascade before it serves: quality and deferral rate, as measured curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class QualityCurve:
    """Quality of a service's images over its deferral rate, linear between measured points.

    It need not be monotone: with some images of the light model a set can be closer to real ones
    than with the heavy model's alone (DiffServe, section 2.1). Deferring beyond the best rate then
    costs GPUs and worsens the images.

    Attributes:
        deferral_rates: of the points, rising from 0 to at most 1.
        scores: measured at them.
        lower_is_better: true for distances such as FID.
    """

    deferral_rates: tuple[float, ...]
    scores: tuple[float, ...]
    lower_is_better: bool = True

    def __post_init__(self) -> None:
        _check_knots("deferral rates", self.deferral_rates, self.scores)
        if self.deferral_rates[0] != 0:
            raise ValueError(
                f"a quality curve begins at a deferral rate of 0; given {self.deferral_rates[0]}"
            )

    @property
    def best_rate(self) -> float:
        """The deferral rate of the best images; the smallest, if there are several."""
        gains = self.gains
        return self.deferral_rates[gains.index(max(gains))]

    @property
    def gains(self) -> tuple[float, ...]:
        """How much better than the light model alone each point is, in units of the score."""
        sign = -1 if self.lower_is_better else 1
        return tuple(sign * (score - self.scores[0]) for score in self.scores)

    def score_at(self, deferral_rate: float) -> float:
        """Return the score at a rate; beyond the last point it stays."""
        return float(np.interp(deferral_rate, self.deferral_rates, self.scores))

    def gain_at(self, deferral_rate: float) -> float:
        """Return how much better than the light model alone images are, in units of the score."""
        return float(np.interp(deferral_rate, self.deferral_rates, self.gains))


@dataclass(frozen=True, slots=True)
class DeferralCurve:
    """Share of images with a confidence below a threshold, linear between measured points.

    It is the distribution function of the confidences, so it starts at (0, 0) and ends at (1, 1).

    Attributes:
        thresholds: of the points, rising from 0 to 1.
        rates: at them, never falling.
    """

    thresholds: tuple[float, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_knots("thresholds", self.thresholds, self.rates)
        ends = (self.thresholds[0], self.rates[0], self.thresholds[-1], self.rates[-1])
        if ends != (0, 0, 1, 1) or any(a > b for a, b in pairwise(self.rates)):
            raise ValueError(
                f"a deferral curve rises from (0, 0) to (1, 1); given {self.thresholds} and "
                f"{self.rates}"
            )

    def rate_at(self, threshold: float) -> float:
        """Return the deferral rate at a threshold."""
        return float(np.interp(threshold, self.thresholds, self.rates))

    def threshold_for(self, rate: float) -> float:
        """Return a threshold that defers so many: the inverse of :meth:`rate_at`."""
        return float(np.interp(rate, self.rates, self.thresholds))


def _check_knots(name: str, knots: Sequence[float], values: Sequence[float]) -> None:
    if len(knots) != len(values) or len(knots) < 2:
        raise ValueError(f"as many values as {name}, two or more; given {knots} and {values}")
    rising = all(a < b for a, b in pairwise(knots))
    if not rising or knots[0] < 0 or knots[-1] > 1 or not np.isfinite(values).all():
        raise ValueError(f"{name} must rise within [0, 1], with finite values; given {knots}")
