"""Summaries of repeated measurements: samples, median, range and a bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_NUM_RESAMPLES = 2000
_SEED = 20251121


@dataclass(frozen=True, slots=True)
class Summary:
    """Repeated measurements of one quantity.

    Attributes:
        ci95: the 95 % bootstrap interval of the median.
    """

    samples: tuple[float, ...]
    median: float
    low: float
    high: float
    ci95: tuple[float, float]

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON, figures to six digits and samples to four."""
        return {
            "n": len(self.samples),
            "median": _rounded(self.median, 6),
            "min": _rounded(self.low, 6),
            "max": _rounded(self.high, 6),
            "ci95": [_rounded(end, 6) for end in self.ci95],
            "samples": [_rounded(sample, 4) for sample in self.samples],
        }


def summarise(samples: Sequence[float]) -> Summary:
    """Return the summary of at least one sample.

    Raises:
        ValueError: there are no samples, or some are not finite.
    """
    values = np.asarray(samples, dtype=float)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"need at least one sample and only finite ones, given {list(samples)}")
    medians = np.median(values[resamples(values.size)], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Summary(
        samples=tuple(values.tolist()),
        median=float(np.median(values)),
        low=float(values.min()),
        high=float(values.max()),
        ci95=(float(low), float(high)),
    )


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Summary:
    """Return the summary of the ratios of measurements that were taken in pairs.

    Raises:
        ValueError: the lengths differ, or a denominator is not positive.
    """
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators for {len(denominators)} denominators")
    if any(value <= 0 for value in denominators):
        raise ValueError("every denominator must be positive")
    return summarise([a / b for a, b in zip(numerators, denominators, strict=True)])


def resamples(count: int) -> npt.NDArray[np.int64]:
    """Return the draws of a bootstrap of so many samples, [resamples, count]; always the same."""
    return np.random.default_rng(_SEED).integers(0, count, (_NUM_RESAMPLES, count))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile of the samples, interpolated."""
    return float(np.percentile(np.asarray(samples, dtype=float), percent))


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
