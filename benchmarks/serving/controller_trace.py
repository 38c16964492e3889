"""A squeezed day of calls for a cascade, and what became of each, over time.

Live and simulated runs give the same answers, so that all tables are made in one way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from benchmarks.stats import resamples
from ray_cluster.simulator.arrivals import daily_rate, draw_arrivals

CV = 1.2
BIN_S = 10.0
_SEED = 11

Fate = Literal["in time", "late", "refused", "failed"]
Stage = Literal["light", "heavy"]


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls for one image each.

    Attributes:
        instants_s: of arrivals, rising.
        prompts: number of each call's prompt.
        peak_per_s: the highest rate.
        slo_s: deadline of each call, from its arrival.
    """

    instants_s: tuple[float, ...]
    prompts: tuple[int, ...]
    duration_s: float
    peak_per_s: float
    slo_s: float


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a call.

    Attributes:
        at_s: its arrival in the trace.
        stage: the model whose image it got; None without an image.
        is_right: whether that image shows what the prompt says; None without one.
    """

    at_s: float
    fate: Fate
    stage: Stage | None = None
    is_right: bool | None = None

    @property
    def is_violation(self) -> bool:
        """Whether there was no image within the deadline."""
        return self.fate != "in time"


@dataclass(frozen=True, slots=True)
class Gap:
    """The difference of two means, and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def size(self) -> float:
        """Whichever is larger."""
        return abs(self.value)

    @property
    def size_interval(self) -> tuple[float, float]:
        """The interval without its sign."""
        ends = sorted((abs(self.low), abs(self.high)))
        return (0.0 if self.low <= 0 <= self.high else ends[0], ends[1])


def squeezed_day(
    low_per_s: float, high_per_s: float, duration_s: float, *, slo_s: float, num_prompts: int
) -> Trace:
    """Return a day's calls from a night at the low rate to noon at the high one; always the same.

    The gaps between calls have a coefficient of variation of 1.2 at every rate. Prompts take
    turns in a random order, so that all of them come equally often.
    """
    rng = np.random.default_rng(_SEED)
    instants = draw_arrivals(daily_rate(low_per_s, high_per_s, duration_s), rng, cv=CV)
    rounds = math.ceil(len(instants) / num_prompts)
    order = np.concatenate([rng.permutation(num_prompts) for _ in range(max(1, rounds))])
    prompts = tuple(int(one) for one in order[: len(instants)])
    return Trace(tuple(instants.tolist()), prompts, duration_s, high_per_s, slo_s)


def violations(answers: Sequence[Answer]) -> list[float]:
    """Return 1 for each violation and 0 for the others, by call."""
    return [float(one.is_violation) for one in answers]


def rights(answers: Sequence[Answer]) -> list[float]:
    """Return 1 for each image that is all right, 0 for the others, NaN without one, by call."""
    return [math.nan if one.is_right is None else float(one.is_right) for one in answers]


def delivered(answers: Sequence[Answer]) -> list[float]:
    """Return 1 for each call with an image in time that is all right, 0 for the others."""
    return [float(bool(one.is_right) and not one.is_violation) for one in answers]


def heavies(answers: Sequence[Answer]) -> list[float]:
    """Return 1 for each image of the heavy model, 0 for the others, NaN without one, by call."""
    return [math.nan if one.stage is None else float(one.stage == "heavy") for one in answers]


FIGURES: dict[str, Callable[[Sequence[Answer]], list[float]]] = {
    "violations, %": violations,
    "all right, %": rights,
    "of calls right in time, %": delivered,
    "heavy, %": heavies,
}


def percent(values: Sequence[float]) -> float:
    """Return the mean of the values that are numbers, in percent; NaN without any."""
    known = [one for one in values if not math.isnan(one)]
    return 100 * sum(known) / len(known) if known else math.nan


def by_bin(
    answers: Sequence[Answer], values: Sequence[float], duration_s: float, bin_s: float = BIN_S
) -> list[float]:
    """Return the mean of the values of the calls that arrived in each bin, in percent."""
    bins: list[list[float]] = [[] for _ in range(max(1, math.ceil(duration_s / bin_s)))]
    for answer, value in zip(answers, values, strict=True):
        bins[min(len(bins) - 1, int(answer.at_s // bin_s))].append(value)
    return [percent(one) for one in bins]


def over_time(
    found: dict[str, Sequence[Answer]], duration_s: float, titles: Collection[str] = tuple(FIGURES)
) -> list[dict[str, Any]]:
    """Return a row for each bin, with figures of each contender.

    A figure is None where a bin has no calls, or no images.
    """
    columns = {
        f"{name}: {title}": by_bin(answers, figure(answers), duration_s)
        for title, figure in FIGURES.items()
        if title in titles
        for name, answers in found.items()
    }
    first = next(iter(found.values()))
    num_bins = max(1, math.ceil(duration_s / BIN_S))
    calls = [0] * num_bins
    for one in first:
        calls[min(num_bins - 1, int(one.at_s // BIN_S))] += 1
    return [
        {"from_s": place * BIN_S, "calls": calls[place]}
        | {name: _rounded(values[place]) for name, values in columns.items()}
        for place in range(num_bins)
    ]


def gap(ours: Sequence[float], others: Sequence[float]) -> Gap:
    """Return the mean of the one less that of the other in points, of the same calls.

    Calls are drawn anew in pairs for the interval. NaN values are left out of either mean.
    """
    if len(ours) != len(others):
        raise ValueError(f"values of the same calls are needed; given {len(ours)}, {len(others)}")
    pairs = np.array([ours, others])
    whole = np.nanmean(pairs, axis=1)
    drawn = np.nanmean(pairs[:, resamples(pairs.shape[1])], axis=2)
    low, high = np.percentile(100 * (drawn[0] - drawn[1]), [2.5, 97.5])
    return Gap(float(100 * (whole[0] - whole[1])), float(low), float(high))


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 1)
