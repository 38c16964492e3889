"""How far predictions of when a request is done turn out to be wrong, and how to allow for it."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from statistics import median

# completions that are remembered
WINDOW = 256
# share of the requests that should be done by when they were promised
PROMISE_QUANTILE = 0.5
# what is assumed before anything was seen, and for how many completions that counts
PRIOR_RATIO = 1.25
_PRIOR_COUNT = 16
# completions by which it is judged what would have become of a request before them
RECENT = 8


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Ratios of real over predicted seconds of the latest completions.

    Attributes:
        ratios: in the order in which they came.
        ordered: the same by size.
    """

    ratios: tuple[float, ...] = (PRIOR_RATIO,) * _PRIOR_COUNT
    ordered: tuple[float, ...] = (PRIOR_RATIO,) * _PRIOR_COUNT

    @property
    def allowance(self) -> float:
        """By what to multiply a prediction so that it is kept with the promised probability."""
        return self.ordered[int(PROMISE_QUANTILE * (len(self.ordered) - 1))]

    @property
    def recent(self) -> float:
        """The median of the latest ratios."""
        return median(self.ratios[-RECENT:])


def observe_end(error: PredictionError, *, predicted_s: float, took_s: float) -> PredictionError:
    """Return the error after one more completion.

    Args:
        predicted_s: seconds that were predicted when the request was let in.
        took_s: seconds from then until it was done.
    """
    if predicted_s <= 0 or took_s <= 0:
        return error
    ratio, ordered = took_s / predicted_s, list(error.ordered)
    is_full = len(error.ratios) >= WINDOW
    if is_full:
        del ordered[bisect_left(ordered, error.ratios[0])]
    insort(ordered, ratio)
    return PredictionError((*error.ratios[is_full:], ratio), tuple(ordered))
