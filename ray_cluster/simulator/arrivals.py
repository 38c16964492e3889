"""Arrival instants: rates over time, and random arrivals at them, smooth or bursty.

Arrivals are drawn at one per unit of time on average, and mapped to seconds by the inverse of the
rate's integral, so that the coefficient of variation (CV) of the gaps holds at every rate: 1 is a
Poisson process, more is bursty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# units of arrivals' own time that pass before the first second: no arrival is due at the beginning
_WARM_UP = 50.0
# gaps that differ less are equal, or the gamma distribution has no finite shape
_LEAST_CV = 1e-6
# of a day's activity by the hour, 0 the least and 1 the most; office hours with a second peak
_DAY = (
    *(0.22, 0.13, 0.06, 0.02, 0.0, 0.03, 0.12, 0.30, 0.55, 0.78, 0.92, 0.98),
    *(0.90, 0.94, 1.0, 0.99, 0.93, 0.82, 0.72, 0.70, 0.74, 0.66, 0.50, 0.34),
)


@dataclass(frozen=True, slots=True)
class RateCurve:
    """Arrivals per second over time, linear between knots.

    Attributes:
        times_s: instants of the knots, rising from 0.
        rates_per_s: the rate at each of them.
    """

    times_s: tuple[float, ...]
    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.times_s) != len(self.rates_per_s) or len(self.times_s) < 2:
            raise ValueError(
                f"a rate curve needs as many rates as times, two or more; given "
                f"{len(self.times_s)} times and {len(self.rates_per_s)} rates"
            )
        rising = all(a < b for a, b in zip(self.times_s, self.times_s[1:], strict=False))
        if self.times_s[0] != 0 or not rising or not math.isfinite(self.times_s[-1]):
            raise ValueError(f"a rate curve's times must rise from 0; given {self.times_s}")
        if not all(math.isfinite(rate) and rate >= 0 for rate in self.rates_per_s):
            raise ValueError(f"rates must be finite and not negative; given {self.rates_per_s}")

    @property
    def duration_s(self) -> float:
        return self.times_s[-1]

    @property
    def expected(self) -> float:
        """Arrivals over the whole curve, on average."""
        return float(self._integrals()[-1])

    def at(self, times_s: Floats) -> Floats:
        """Return the rates at instants [N]."""
        rates: Floats = np.interp(times_s, self.times_s, self.rates_per_s)
        return rates

    def instants_of(self, counts: Floats) -> Floats:
        """Return the instants [N] by which that many arrivals have come on average.

        Args:
            counts: [N], from 0 up to `expected`.
        """
        times, rates = np.array(self.times_s), np.array(self.rates_per_s)
        integrals = self._integrals()
        piece = np.clip(np.searchsorted(integrals, counts, side="right") - 1, 0, len(times) - 2)
        start, width = rates[piece], np.diff(times)[piece]
        slope = (rates[piece + 1] - start) / width
        left = np.maximum(counts - integrals[piece], 0)
        # left = start x + slope x^2 / 2, solved so that a slope of 0 does no harm
        root = np.sqrt(np.maximum(start**2 + 2 * slope * left, 0))
        passed = np.divide(2 * left, start + root, out=np.zeros_like(left), where=start + root > 0)
        instants: Floats = times[piece] + np.minimum(passed, width)
        return instants

    def _integrals(self) -> Floats:
        """Arrivals up to each knot, on average."""
        rates = np.array(self.rates_per_s)
        areas = np.diff(self.times_s) * (rates[1:] + rates[:-1]) / 2
        return np.concatenate([[0.0], np.cumsum(areas)])


def constant_rate(rate_per_s: float, duration_s: float) -> RateCurve:
    """Return a rate that stays the same."""
    return RateCurve((0.0, duration_s), (rate_per_s, rate_per_s))


def daily_rate(low_per_s: float, high_per_s: float, duration_s: float) -> RateCurve:
    """Return a day from midnight to midnight, from the low rate at night to the high one by day.

    The day is squeezed into `duration_s`. Its shape is ours: a night, office hours with a dip at
    noon, and an evening.
    """
    if not 0 <= low_per_s <= high_per_s:
        raise ValueError(f"a day needs 0 <= low <= high; given {low_per_s} and {high_per_s}")
    shape = (*_DAY, _DAY[0])
    times_s = tuple(duration_s * hour / 24 for hour in range(25))
    return RateCurve(times_s, tuple(low_per_s + (high_per_s - low_per_s) * one for one in shape))


def draw_arrivals(curve: RateCurve, rng: np.random.Generator, *, cv: float = 1.0) -> Floats:
    """Draw the instants of arrivals over a curve, rising.

    Args:
        curve: the rate.
        rng: where randomness comes from.
        cv: of the gaps, which are gamma distributed; 0 is a clock.

    Raises:
        ValueError: the CV is negative or not a number.
    """
    if not (math.isfinite(cv) and cv >= 0):
        raise ValueError(f"the CV must be finite and not negative; given {cv}")
    wanted, total = curve.expected + _WARM_UP, 0.0
    parts: list[Floats] = []
    while total <= wanted:
        gaps = _gaps(int(1.2 * wanted) + 16, cv, rng)
        parts.append(gaps)
        total += float(gaps.sum())
    # a clock starts at a random moment of its period
    phase = rng.random() if cv < _LEAST_CV else 0.0
    counts = np.cumsum(np.concatenate(parts)) - _WARM_UP + phase
    return curve.instants_of(counts[(counts >= 0) & (counts < curve.expected)])


def _gaps(count: int, cv: float, rng: np.random.Generator) -> Floats:
    if cv < _LEAST_CV:
        return np.ones(count)
    shape = 1 / cv**2
    return rng.gamma(shape, 1 / shape, count)
