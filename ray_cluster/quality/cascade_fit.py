"""Fits what a cascade is run by to scores of its discriminator and to how good its images are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ray_cluster.errors import ConfigError
from ray_cluster.policies.cascade import DeferralCurve, QualityCurve

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_KNOTS = 101
_RATES = 21
_NEWTON_STEPS = 100


def fit_logistic(scores: Floats, outcomes: Flags) -> tuple[float, float]:
    """Return scale and shift of the logistic that makes probabilities of scores (Platt).

    The outcomes count as almost certain only, so that scores that separate them have a finite fit
    (Platt, 1999: Probabilistic outputs for support vector machines, section 2.2).

    Raises:
        ConfigError: all outcomes are equal, or higher scores do not make them likelier.
    """
    num_right = int(outcomes.sum())
    if not 0 < num_right < len(outcomes):
        raise ConfigError(
            f"{num_right} of {len(outcomes)} images are right, so nothing tells right from wrong: "
            "give more prompts, easy and hard ones"
        )
    if np.unique(scores).size < 2:
        raise ConfigError("all images have the same score: this discriminator cannot tell them")
    num_wrong = len(outcomes) - num_right
    targets = np.where(outcomes, (num_right + 1) / (num_right + 2), 1 / (num_wrong + 2))
    # of standard scores, for a fit that any scale of scores suits
    mean, spread = float(scores.mean()), float(scores.std())
    inputs = np.stack([(scores - mean) / spread, np.ones_like(scores)], 1)
    weights = np.zeros(2)
    for _ in range(_NEWTON_STEPS):
        found = 1 / (1 + np.exp(-np.clip(inputs @ weights, -50, 50)))
        slope = inputs.T @ (found - targets)
        curvature = (inputs * (found * (1 - found))[:, None]).T @ inputs + 1e-9 * np.eye(2)
        step = np.linalg.solve(curvature, slope)
        # a step of Newton's too long would leave the valley
        weights -= step * min(1.0, 2.0 / max(1e-12, float(np.abs(step).max())))
        if np.abs(step).max() < 1e-9:
            break
    scale = float(weights[0]) / spread
    if scale <= 0:
        raise ConfigError(
            "images with higher scores are not right more often: this discriminator cannot decide "
            "for these models; take another, or more prompts"
        )
    return scale, float(weights[1]) - scale * mean


def quality_curve(
    confidences: Floats, light: Floats, heavy: Floats, *, lower_is_better: bool = False
) -> QualityCurve:
    """Return the quality by the share of images made anew, at every twentieth; see `quality_at`."""
    rates = np.linspace(0, 1, _RATES)
    found = quality_at(confidences, light, heavy, rates)
    return QualityCurve(tuple(rates.tolist()), tuple(found.tolist()), lower_is_better)


def quality_at(confidences: Floats, light: Floats, heavy: Floats, rates: Floats) -> Floats:
    """Return the mean quality where these shares of the least confident images are made anew.

    A share that ends within an image, or among equal confidences, takes a part of each.

    Args:
        confidences: of light images, in [0, 1].
        light: how good each of them is.
        heavy: how good the heavy model's for the same prompt is.
    """
    _, rank = np.unique(confidences, return_inverse=True)
    shares = np.cumsum(np.bincount(rank)) / len(confidences)
    gained = np.cumsum(np.bincount(rank, heavy - light)) / len(confidences)
    found: Floats = float(light.mean()) + np.interp(rates, [0, *shares], [0, *gained])
    return found


def deferral_curve(confidences: Floats) -> DeferralCurve:
    """Return the share of confidences below each threshold."""
    inner = np.unique(np.quantile(confidences, np.linspace(0, 1, _KNOTS)))
    inner = inner[(inner > 0) & (inner < 1)]
    below = [float((confidences < one).mean()) for one in inner]
    return DeferralCurve((0.0, *inner.tolist(), 1.0), (0.0, *below, 1.0))


def area_under_curve(scores: Floats, outcomes: Flags) -> float:
    """Return the chance that a right image has a higher score than a wrong one; ties count half.

    It is a half where there are not both.
    """
    right, wrong = scores[outcomes], np.sort(scores[~outcomes])
    if not (len(right) and len(wrong)):
        return 0.5
    below = np.searchsorted(wrong, right, "left") + np.searchsorted(wrong, right, "right")
    return float(below.mean() / (2 * len(wrong)))


def calibration_error(confidences: Floats, outcomes: Flags, bins: int = 10) -> float:
    """Return how far confidences are from the shares that are right, over bins of equal size."""
    order = np.argsort(confidences, kind="stable")
    parts = np.array_split(order, min(bins, len(order)))
    gaps = [abs(float(confidences[part].mean() - outcomes[part].mean())) for part in parts]
    return float(np.average(gaps, weights=[len(part) for part in parts]))
