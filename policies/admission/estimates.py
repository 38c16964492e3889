"""Running estimates that predictions rest on: their own errors, arrivals, time outside of steps."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.costs.cost_model import share_after
from ray_cluster.policies.types import RequestView

# completions that count for the errors
ERROR_WINDOW = 64
# share of the requests that should be done by when they were promised
PROMISE_QUANTILE = 0.5
# assumed before anything was observed, with the weight of so many completions
PRIOR_RATIO = 1.25
_PRIOR_COUNT = 16
# requests that count for the arrival rate, and fewer than which say nothing of it
ARRIVAL_WINDOW, _FEWEST_ARRIVALS = 32, 8
# completions that count for the times outside of steps
_STAGE_WINDOW = 16


@dataclass(frozen=True, slots=True)
class PredictionError:
    """Ratios of real over predicted seconds of the latest completions.

    Attributes:
        ratios: in order of completion.
        ordered: the same by size.
    """

    ratios: tuple[float, ...] = (PRIOR_RATIO,) * _PRIOR_COUNT
    ordered: tuple[float, ...] = (PRIOR_RATIO,) * _PRIOR_COUNT

    @property
    def safety_factor(self) -> float:
        return self.ordered[int(PROMISE_QUANTILE * (len(self.ordered) - 1))]


def observe_end(error: PredictionError, *, predicted_s: float, took_s: float) -> PredictionError:
    """Return the error after one more completion; times that are not positive are ignored."""
    if predicted_s <= 0 or took_s <= 0:
        return error
    ratio, ordered = took_s / predicted_s, list(error.ordered)
    is_full = len(error.ratios) >= ERROR_WINDOW
    if is_full:
        del ordered[bisect_left(ordered, error.ratios[0])]
    insort(ordered, ratio)
    return PredictionError((*error.ratios[is_full:], ratio), tuple(ordered))


def faded_error(error: PredictionError, silent_s: float, *, took_s: float) -> PredictionError:
    """Return what an error still says after a time without a completion.

    The older completions count no more, and where few are left, the prior has its weight again. So
    a busy spell is forgotten even if all that comes after it is refused.

    Args:
        silent_s: seconds since the last completion.
        took_s: seconds that it took; slow images are waited for.
    """
    num_left = math.ceil(len(error.ratios) * share_after(silent_s, half_life_s=took_s))
    if num_left >= len(error.ratios):
        return error
    prior = (PRIOR_RATIO,) * max(0, _PRIOR_COUNT - num_left)
    ratios = (*prior, *error.ratios[len(error.ratios) - num_left :])
    return PredictionError(ratios, tuple(sorted(ratios)))


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The latest accepted requests, from which later arrivals are extrapolated.

    Attributes:
        recent: the latest last; their deadlines are in seconds after their arrivals.
    """

    recent: tuple[RequestView, ...] = ()

    def interval_s(self, now_s: float) -> float:
        """Return the mean seconds between two arrivals; infinite if too few have come.

        The time since the last one counts, so that a burst that is over is soon forgotten.
        """
        if len(self.recent) < _FEWEST_ARRIVALS:
            return math.inf
        return (now_s - self.recent[0].arrival_s) / len(self.recent)


def observe_arrivals(arrivals: Arrivals, requests: Sequence[RequestView]) -> Arrivals:
    """Return the estimate after more requests were accepted."""
    relative = [replace(one, deadline_s=one.deadline_s - one.arrival_s) for one in requests]
    return Arrivals((*arrivals.recent, *relative)[-ARRIVAL_WINDOW:])


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds that a request of a model spends outside of its steps.

    Attributes:
        encode_s: from its lease until its first step.
        rest_s: from its last step until the dispatcher has the image, without its decoding.
        num_observed: completions so far.
    """

    encode_s: float = 0.0
    rest_s: float = 0.0
    num_observed: int = 0


def observe_stages(times: StageTimes, *, encode_s: float, rest_s: float) -> StageTimes:
    """Return the estimate after one more completion; earlier ones fade exponentially."""
    num_observed = times.num_observed + 1
    weight = 1 / min(num_observed, _STAGE_WINDOW)
    return StageTimes(
        encode_s=times.encode_s + weight * (encode_s - times.encode_s),
        rest_s=times.rest_s + weight * (max(0.0, rest_s) - times.rest_s),
        num_observed=num_observed,
    )
