"""Which light images are good enough, and which the heavy model makes anew.

An image whose confidence is below a threshold is deferred (DiffServe, section 3.2). The threshold
follows from a wanted deferral rate and the latest confidences, so that harder prompts do not
overload the heavy model. It is lower for a request that the heavy model can hardly finish in time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ray_cluster.policies.planning.plan import CascadePlan
from ray_cluster.policies.types import CascadeEntry, CascadeReason

# of the slack that an idle heavy model would leave, above which a request's threshold rises
_IDLE_FROM = 0.5
# before its deadline, at which a light image is published for a heavy one that is not there yet
_LAST_S = 0.05


@dataclass(frozen=True, slots=True)
class QualityCurve:
    """Quality of a service's images over its deferral rate, linear between measured points.

    It need not be monotone: a mix of light and heavy images can be closer to real ones than heavy
    images alone (DiffServe, section 2.1).

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
        """The smallest deferral rate of the best images."""
        gains = self.gains
        return self.deferral_rates[gains.index(max(gains))]

    @property
    def gains(self) -> tuple[float, ...]:
        """Improvement over the light model alone at each point, in units of the score."""
        sign = -1 if self.lower_is_better else 1
        return tuple(sign * (score - self.scores[0]) for score in self.scores)

    def score_at(self, deferral_rate: float) -> float:
        """Return the score at a rate, constant beyond the last point."""
        return float(np.interp(deferral_rate, self.deferral_rates, self.scores))


def capped(curve: QualityCurve, most_rate: float) -> QualityCurve:
    """Return a curve that ends at a deferral rate; it has two points even where that is 0."""
    end = min(max(most_rate, 0.001), curve.deferral_rates[-1])
    rates = (*(one for one in curve.deferral_rates if one < end), end)
    scores = tuple(curve.score_at(one) for one in rates)
    return QualityCurve(rates, scores, curve.lower_is_better)


@dataclass(frozen=True, slots=True)
class DeferralCurve:
    """Share of images with a confidence below a threshold, linear between measured points.

    Attributes:
        thresholds: of the points, rising from 0 to 1.
        rates: at them, rising from 0 to 1.
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
        return float(np.interp(threshold, self.thresholds, self.rates))

    def threshold_for(self, rate: float) -> float:
        return float(np.interp(rate, self.rates, self.thresholds))


def _check_knots(name: str, knots: Sequence[float], values: Sequence[float]) -> None:
    if len(knots) != len(values) or len(knots) < 2:
        raise ValueError(f"as many values as {name}, two or more; given {knots} and {values}")
    rising = all(a < b for a, b in pairwise(knots))
    if not rising or knots[0] < 0 or knots[-1] > 1 or not np.isfinite(values).all():
        raise ValueError(f"{name} must rise within [0, 1], with finite values; given {knots}")


@dataclass(frozen=True, slots=True)
class ConfidenceWindow:
    """The latest confidences of a cascade, of which thresholds are quantiles.

    Attributes:
        confidences: oldest first.
        size: most that are stored.
    """

    confidences: tuple[float, ...]
    size: int

    def __post_init__(self) -> None:
        if not 0 < len(self.confidences) <= self.size:
            raise ValueError(
                f"a window holds 1 to {self.size} confidences; given {len(self.confidences)}"
            )


def window_from(curve: DeferralCurve, size: int) -> ConfidenceWindow:
    """Return a window filled from an offline curve, which observations then push out."""
    ranks = range(size)
    # neighbours are far apart in rank, so that the curve fades evenly
    stride = next(one for one in range(size // 2 + 1, size + 2) if math.gcd(one, size) == 1)
    mixed = ((rank * stride) % size for rank in ranks)
    return ConfidenceWindow(tuple(curve.threshold_for((rank + 0.5) / size) for rank in mixed), size)


def observe(window: ConfidenceWindow, confidences: Iterable[float]) -> ConfidenceWindow:
    """Return the window with later confidences, without the oldest beyond its size.

    Every confidence counts, of deferred and of published images: a selection would shift quantiles.
    """
    kept = (*window.confidences, *confidences)[-window.size :]
    return replace(window, confidences=kept)


def drift(window: ConfidenceWindow, curve: DeferralCurve) -> float:
    """Return the largest difference in deferral rate at one threshold, in [0, 1].

    Between the window's confidences and what a curve was calibrated to: Kolmogorov and Smirnov's
    distance.
    """
    ranked, size = sorted(window.confidences), len(window.confidences)
    expected = [curve.rate_at(one) for one in ranked]
    steps = ((rate - n / size, (n + 1) / size - rate) for n, rate in enumerate(expected))
    return max(max(below, above) for below, above in steps)


def deferral_rate(window: ConfidenceWindow, threshold: float) -> float:
    """Return the share of the window's images that a threshold defers."""
    return sum(one < threshold for one in window.confidences) / len(window.confidences)


def threshold_for(window: ConfidenceWindow, rate: float) -> float:
    """Return the highest threshold that defers no more than that share of the window.

    It is one of the window's confidences, or infinite if everything may be deferred.
    """
    ranked = sorted(window.confidences)
    # a rate such as 0.3 of 10 must not lose its third to rounding
    num_deferred = math.floor(rate * len(ranked) + 1e-9)
    return ranked[max(0, num_deferred)] if num_deferred < len(ranked) else math.inf


@dataclass(frozen=True, slots=True)
class Slack:
    """Seconds that are left before a request's deadline once the heavy model is done.

    Attributes:
        present_s: after what it has to do now; negative if it would be late.
        idle_s: if it had nothing else to do.
    """

    present_s: float
    idle_s: float


NO_HURRY = Slack(math.inf, math.inf)
"""Of a request without a deadline, or where slack does not matter."""


def request_threshold(plan: CascadePlan, slack: Slack) -> float:
    """Return the confidence below which one request is deferred, given its slack.

    Deferring is worth nothing if the image then comes late. So with a chance P of being in time,
    only confidences whose gain is 1/P as large are worth it; the gain falls about linearly with
    confidence, so the threshold is P times that of others. P is taken to rise linearly from 0
    without slack to 1 at the reserve, about two standard deviations of the predicted finish.

    A planned threshold is for the heavy model's queue as it is expected. Where more than half of
    the slack is left that an idle heavy model would leave, the queue is shorter, and time on the
    heavy model is cheap: the threshold rises linearly to the one of idle models. So a plan that
    takes the heavy model for slower than it is does not let it stand idle.

    Args:
        plan: whose ``threshold`` is of requests with time enough, whose ``reserve_s`` is the slack
            that is enough for certain (0 trusts the prediction, None ignores slack), and whose
            ``idle_threshold`` is that of an image for which the heavy model stands idle.
    """
    if plan.reserve_s is None:
        return plan.threshold
    if slack.present_s < 0:
        return 0.0
    threshold = _with_idle(plan, slack)
    if slack.present_s >= plan.reserve_s:
        return threshold
    # an infinite threshold defers whatever can be in time
    return min(threshold, 1.0) * slack.present_s / plan.reserve_s


def _with_idle(plan: CascadePlan, slack: Slack) -> float:
    idle, has_queue = _highest(plan), math.isfinite(slack.present_s) and slack.idle_s > 0
    # a request without a deadline does not tell how long the queue is
    if idle <= plan.threshold or not has_queue:
        return plan.threshold
    rise = (slack.present_s / slack.idle_s - _IDLE_FROM) / (1 - _IDLE_FROM)
    if rise >= 1:
        return idle
    # confidences are at most 1, thresholds may be infinite
    return plan.threshold + max(0.0, rise) * (min(idle, 1.0) - plan.threshold)


def _highest(plan: CascadePlan) -> float:
    """Return the threshold that no request's is above."""
    if plan.idle_threshold is None or plan.reserve_s is None:
        return plan.threshold
    return max(plan.threshold, plan.idle_threshold)


@dataclass(frozen=True, slots=True)
class CascadeDecision:
    """What becomes of a light image.

    Attributes:
        is_deferred: whether the heavy model makes the image anew; else the light one is published.
        reason: ``confident`` and ``deferred``: its confidence is above or below the threshold;
            ``no_time``: the heavy model would be wanted, but has too much to do, or would probably
            be late;
            ``scorer_away``: nobody could say how good it is; ``random_routing``: the plan defers
            nothing.
    """

    is_deferred: bool
    reason: CascadeReason


def needs_slack(plan: CascadePlan, confidence: float) -> bool:
    """Return whether :func:`decide_deferral` depends on the slack, which costs a prediction."""
    is_wanted = plan.routing == "confidence" and confidence < _highest(plan)
    return is_wanted and plan.reserve_s is not None


def decide_deferral(
    plan: CascadePlan, confidence: float, slack: Slack = NO_HURRY
) -> CascadeDecision:
    """Decide whether the heavy model makes an image anew (DiffServe, section 3.2).

    Args:
        confidence: of the light image, in [0, 1].
        slack: read only where :func:`needs_slack` says so.
    """
    if plan.routing == "random":
        return CascadeDecision(is_deferred=False, reason="random_routing")
    if confidence < request_threshold(plan, slack):
        return CascadeDecision(is_deferred=True, reason="deferred")
    # below either threshold, the heavy model's image would be worth its time if there were any
    is_wanted = confidence < _highest(plan)
    return CascadeDecision(is_deferred=False, reason="no_time" if is_wanted else "confident")


def decide_unscored(wanted: CascadeEntry, slack_s: float) -> CascadeDecision:
    """Decide over a light image that could not be scored.

    Args:
        wanted: the model whose image is published then; the heavy one only if it is in time.
        slack_s: left before the deadline once the heavy model is done.
    """
    if wanted == "heavy" and slack_s < 0:
        return CascadeDecision(is_deferred=False, reason="no_time")
    return CascadeDecision(is_deferred=wanted == "heavy", reason="scorer_away")


def given_up_s(deadline_s: float, rest_s: float, told_s: float | None) -> float:
    """Return the instant from which a heavy image is not waited for any more.

    One that waits is given up when it cannot be in time even alone. One that is being made may be
    further than was told, so it has until just before its deadline, unless it was late already.

    Args:
        rest_s: seconds that it still takes on an idle replica, by what was told last.
        told_s: instant of that; None while it waits.
    """
    if told_s is None:
        return deadline_s - rest_s
    is_late = told_s + rest_s > deadline_s
    return -math.inf if is_late else deadline_s - _LAST_S


def entry_for_quality(quality: str | None) -> CascadeEntry | None:
    """Return the model that alone makes an image of an asked quality; None for either."""
    if quality == "low":
        return "light"
    return "heavy" if quality in ("high", "hd", "xhigh", "max") else None


def cascade_entry(
    addons: Collection[str], supported: Collection[str], *, is_edit: bool = False
) -> CascadeEntry:
    """Return which model a request goes to first: heavy if the light one lacks an add-on.

    Args:
        addons: names of the request's LoRAs and ControlNets.
        supported: those that the light model has; ``"mask"`` among them if it edits.
        is_edit: whether the request has a mask.
    """
    wanted = {*addons, *(("mask",) if is_edit else ())}
    return "light" if wanted <= set(supported) else "heavy"
