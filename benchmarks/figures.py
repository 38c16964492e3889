"""Summaries of repeated measurements, and aims beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Figure = dict[str, Any]
"""A summary: ``n``, ``median``, ``min``, ``max``, ``ci95`` (of the median) and ``samples``."""

_NUM_RESAMPLES = 2000
_SEED = 20251121


def summarise(samples: Sequence[float]) -> Figure:
    """Return the summary of at least one sample; its interval is a bootstrap of the median.

    Raises:
        ValueError: there are no samples, or some are not finite.
    """
    values = np.asarray(samples, dtype=float)
    if values.size == 0 or not np.isfinite(values).all():
        raise ValueError(f"need at least one sample and only finite ones, given {list(samples)}")
    medians = np.median(values[resamples(values.size)], axis=1)
    return {
        "n": values.size,
        "median": _rounded(np.median(values), 6),
        "min": _rounded(values.min(), 6),
        "max": _rounded(values.max(), 6),
        "ci95": [_rounded(end, 6) for end in np.percentile(medians, [2.5, 97.5])],
        "samples": [_rounded(one, 4) for one in values],
    }


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Figure:
    """Return the summary of the ratios of measurements that were taken in pairs.

    Raises:
        ValueError: the lengths differ, or a denominator is not positive.
    """
    if any(value <= 0 for value in denominators):
        raise ValueError("every denominator must be positive")
    return summarise([a / b for a, b in zip(numerators, denominators, strict=True)])


def resamples(count: int) -> npt.NDArray[np.int64]:
    """Return the draws of a bootstrap of so many samples, [resamples, count]; always the same."""
    return np.random.default_rng(_SEED).integers(0, count, (_NUM_RESAMPLES, count))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return a percentile of the samples, interpolated."""
    return float(np.percentile(np.asarray(samples, dtype=float), percent))


def mean_figure(samples: Sequence[float]) -> Figure:
    """Return ``value``, the mean, with the ends of its normal 95 % interval."""
    values = np.asarray(samples, dtype=float)
    spread = 1.96 * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    mean = float(values.mean())
    return {"value": mean, "low": mean - spread, "high": mean + spread}


def scaled(figure: Mapping[str, Any], times: float, less: float = 0.0) -> Figure:
    """Return ``value``, ``low`` and ``high`` of a figure, each less something, times a factor."""
    ends = sorted(times * (end - less) for end in interval_of(figure))
    return {"value": times * (value_of(figure) - less), "low": ends[0], "high": ends[1]}


def absolute(figure: Mapping[str, Any]) -> Figure:
    """Return a difference without its sign."""
    low, high = interval_of(figure)
    ends = sorted((abs(low), abs(high)))
    least = 0.0 if low <= 0 <= high else ends[0]
    return {"value": abs(value_of(figure)), "low": least, "high": ends[1]}


def at_least(name: str, least: float, figure: Mapping[str, Any] | float, unit: str) -> Figure:
    """Return the aim of a figure that should not be below a level."""
    low, high = interval_of(figure)
    return _aim(name, f"at least {least:g} {unit}", figure, unit, low >= least, high < least)


def at_most(name: str, most: float, figure: Mapping[str, Any] | float, unit: str) -> Figure:
    """Return the aim of a figure that should not be above a level."""
    low, high = interval_of(figure)
    return _aim(name, f"at most {most:g} {unit}", figure, unit, high <= most, low > most)


def interval_of(figure: Mapping[str, Any] | float) -> tuple[float, float]:
    """Return the 95 % interval of a figure; of a number the number twice."""
    if not isinstance(figure, Mapping):
        return (figure, figure)
    return tuple(figure["ci95"]) if "ci95" in figure else (figure["low"], figure["high"])


def value_of(figure: Mapping[str, Any] | float) -> float:
    """Return a figure's median or value."""
    if not isinstance(figure, Mapping):
        return figure
    return float(figure["median"] if "median" in figure else figure["value"])


def _aim(
    name: str, wanted: str, figure: Mapping[str, Any] | float, unit: str, met: bool, missed: bool
) -> Figure:
    """``unsure`` is the verdict where the interval lies on both sides of the level."""
    return {
        "name": name,
        "wanted": wanted,
        "measured": value_of(figure),
        "unit": unit,
        "interval": list(interval_of(figure)),
        "verdict": "yes" if met else "no" if missed else "unsure",
    }


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
