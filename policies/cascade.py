"""Which images the light model's answer is good enough for, and which the heavy model makes anew.

An image whose confidence is below a threshold is deferred (DiffServe, section 3.2). Here the
threshold follows from a wanted deferral rate and the confidences seen lately, so that prompts that
get harder do not overload the heavy model; and it is lower for a request that the heavy model can
hardly finish in time. Requests that the light model cannot serve never enter the cascade.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from ray_cluster.policies.cascade_curves import DeferralCurve
from ray_cluster.policies.plan import CascadePlan

CascadeEntry = Literal["light", "heavy"]
CascadeReason = Literal["confident", "deferred", "no_time", "scorer_away", "random_routing"]


@dataclass(frozen=True, slots=True)
class ConfidenceWindow:
    """The latest confidences of a cascade, of which thresholds are quantiles.

    Attributes:
        confidences: oldest first.
        size: most that are kept.
    """

    confidences: tuple[float, ...]
    size: int

    def __post_init__(self) -> None:
        if not 0 < len(self.confidences) <= self.size:
            raise ValueError(
                f"a window holds 1 to {self.size} confidences; given {len(self.confidences)}"
            )


def window_from(curve: DeferralCurve, size: int) -> ConfidenceWindow:
    """Return a window as an offline curve would fill it; observations then push that out."""
    ranks = range(size)
    # neighbours are far apart in rank, so that the curve fades evenly
    stride = next(one for one in range(size // 2 + 1, size + 2) if math.gcd(one, size) == 1)
    mixed = ((rank * stride) % size for rank in ranks)
    return ConfidenceWindow(tuple(curve.threshold_for((rank + 0.5) / size) for rank in mixed), size)


def observe(window: ConfidenceWindow, confidences: Iterable[float]) -> ConfidenceWindow:
    """Return the window with later confidences, without the oldest that no longer fit.

    Every confidence must be given, of deferred and of answered images alike: a selection would
    shift the quantiles.
    """
    kept = (*window.confidences, *confidences)[-window.size :]
    return replace(window, confidences=kept)


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
class HeavyOutlook:
    """What waits for an image that is deferred now.

    Attributes:
        free_in_s: seconds until each live replica of the heavy model is free, rising.
        num_ahead: images that are deferred and wait.
        max_batch: images that a replica takes at once.
        batch_s: seconds of a full batch.
    """

    free_in_s: tuple[float, ...]
    num_ahead: int
    max_batch: int
    batch_s: float


def heavy_finish_s(outlook: HeavyOutlook) -> float:
    """Return the seconds until the heavy model has made an image that is deferred now.

    Full batches in the order of the queue, each on the replica that is free first: exact where
    batches fill and take as long as the profile says, and late rather than early where they don't
    fill. Infinite without a replica.
    """
    free = outlook.free_in_s
    if not free:
        return math.inf
    rounds, place = divmod(outlook.num_ahead // outlook.max_batch, len(free))
    return free[place] + (rounds + 1) * outlook.batch_s


def request_threshold(threshold: float, slack_s: float, reserve_s: float) -> float:
    """Return the confidence below which one request is deferred, given its slack.

    Slack is what would be left before the deadline once the heavy model is done. The threshold t is
    where the gain of another image is worth a place on the heavy model. A place is worth nothing if
    the image then comes late, so with a chance P of being in time only confidences whose gain is
    1/P as large are worth it; the gain grows as confidence falls, about linearly, so the threshold
    is P t. P is taken to rise from 0 without slack to 1 at a reserve of about two standard
    deviations of the predicted finish:

        t min(1, max(0, slack / reserve))

    Args:
        threshold: of requests with time enough.
        slack_s: seconds; negative if the heavy model would be late.
        reserve_s: slack that is enough for certain; 0 trusts the prediction.
    """
    if slack_s < 0:
        return 0.0
    if slack_s >= reserve_s:
        return threshold
    # an infinite threshold defers whatever can be in time
    return min(threshold, 1.0) * slack_s / reserve_s


@dataclass(frozen=True, slots=True)
class CascadeDecision:
    """What becomes of a light image.

    Attributes:
        is_deferred: whether the heavy model makes the image anew; else the light one is published.
        reason: ``confident`` and ``deferred``: its confidence is above or below the threshold;
            ``no_time``: the heavy model would be wanted, but would probably be late;
            ``scorer_away``: nobody could say how good it is; ``random_routing``: the plan defers
            nothing.
    """

    is_deferred: bool
    reason: CascadeReason


def needs_slack(plan: CascadePlan, confidence: float) -> bool:
    """Return whether :func:`decide_deferral` depends on the slack, which costs a prediction."""
    is_wanted = plan.routing == "confidence" and confidence < plan.threshold
    return is_wanted and plan.reserve_s is not None


def decide_deferral(
    plan: CascadePlan, confidence: float, slack_s: float = math.inf
) -> CascadeDecision:
    """Decide whether the heavy model makes an image anew (DiffServe, section 3.2).

    Args:
        confidence: of the light image, in [0, 1].
        slack_s: seconds left before the deadline once the heavy model is done, negative if that
            would be late; read only where :func:`needs_slack` says so.
    """
    if plan.routing == "random":
        return CascadeDecision(is_deferred=False, reason="random_routing")
    if confidence >= plan.threshold:
        return CascadeDecision(is_deferred=False, reason="confident")
    threshold = plan.threshold
    if plan.reserve_s is not None:
        threshold = request_threshold(threshold, slack_s, plan.reserve_s)
    if confidence < threshold:
        return CascadeDecision(is_deferred=True, reason="deferred")
    return CascadeDecision(is_deferred=False, reason="no_time")


def decide_unscored(wanted: CascadeEntry, slack_s: float) -> CascadeDecision:
    """Decide over a light image that nobody could score.

    Args:
        wanted: whose image is published then.
        slack_s: as for :func:`decide_deferral`; the heavy model is used only if it is in time.
    """
    if wanted == "heavy" and slack_s < 0:
        return CascadeDecision(is_deferred=False, reason="no_time")
    return CascadeDecision(is_deferred=wanted == "heavy", reason="scorer_away")


def answers_with_light(plan: CascadePlan, left_s: float) -> bool:
    """Return whether a light image is published for a heavy one that will not come.

    Args:
        left_s: seconds until the deadline; infinite for a request that is wanted even if late.
    """
    return plan.when_late == "light" and left_s >= 0


def cascade_entry(
    addons: Collection[str], supported: Collection[str], *, is_edit: bool = False
) -> CascadeEntry:
    """Return which model a request goes to first.

    A request with a LoRA, ControlNet or mask that the light model does not support skips the
    cascade: an answer without it would not be what was asked for.

    Args:
        addons: names of the request's LoRAs and ControlNets.
        supported: those that the light model has; ``"mask"`` among them if it edits.
        is_edit: whether the request has a mask.
    """
    wanted = {*addons, *(("mask",) if is_edit else ())}
    return "light" if wanted <= set(supported) else "heavy"
