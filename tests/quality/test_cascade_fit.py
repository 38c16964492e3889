"""What a cascade is run by follows from its images as it should."""

from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import minimize

from ray_cluster.errors import ConfigError
from ray_cluster.models.cascade_curves import (
    CascadeCurves,
    load_curves,
    save_curves,
)
from ray_cluster.policies.cascade import deferral_rate, window_from
from ray_cluster.quality.cascade_fit import (
    area_under_curve,
    calibration_error,
    deferral_curve,
    fit_logistic,
    quality_at,
    quality_curve,
)

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e4])
def test_the_logistic_is_the_likeliest_in_any_unit(unit: float) -> None:
    scores = unit * RNG.normal(0.3, 0.1, 400)
    outcomes = RNG.random(400) < 1 / (1 + np.exp(-20 * (scores / unit - 0.35)))
    scale, shift = fit_logistic(scores, outcomes)
    right, wrong = outcomes.sum(), (~outcomes).sum()
    targets = np.where(outcomes, (right + 1) / (right + 2), 1 / (wrong + 2))

    def loss(weights: np.ndarray) -> float:
        logits = weights[0] * scores / unit + weights[1]
        return float((np.logaddexp(0, logits) - targets * logits).sum())

    best = minimize(loss, [1.0, 0.0], tol=1e-10).x
    assert [scale * unit, shift] == pytest.approx(best.tolist(), rel=1e-3, abs=1e-3)


def test_scores_that_separate_all_images_have_a_finite_fit() -> None:
    scale, shift = fit_logistic(np.arange(20.0), np.arange(20) >= 10)
    assert np.isfinite([scale, shift]).all()
    assert 9 < -shift / scale < 10


@pytest.mark.parametrize(
    ("scores", "outcomes", "said"),
    [
        (np.arange(4.0), np.ones(4, bool), "4 of 4 images are right"),
        (np.ones(4), np.arange(4) > 1, "all images have the same score"),
        (np.arange(4.0), np.arange(4) < 2, "not right more often"),
    ],
)
def test_scores_that_tell_nothing_are_refused(
    scores: np.ndarray, outcomes: np.ndarray, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        fit_logistic(scores, outcomes)


def test_the_least_confident_are_made_anew_first_and_equal_ones_in_part() -> None:
    confidences, light = np.array([0.9, 0.1, 0.5, 0.5]), np.array([1.0, 0.0, 1.0, 0.0])
    found = quality_at(confidences, light, np.ones(4), np.array([0, 0.25, 0.5, 0.75, 1]))
    assert found.tolist() == pytest.approx([0.5, 0.75, 0.875, 1, 1])


def test_curves_are_read_as_they_were_written(tmp_path: Path) -> None:
    confidences = RNG.beta(2, 1, 700)
    light, heavy = (RNG.random(700) for _ in range(2))
    curves = CascadeCurves(deferral_curve(confidences), quality_curve(confidences, light, heavy))
    save_curves(curves, tmp_path / "deferral.json", {"seed": 1})
    assert load_curves(tmp_path) == load_curves(tmp_path / "deferral.json") == curves
    for threshold in (0.2, 0.5, 0.8):
        share = float((confidences < threshold).mean())
        assert curves.deferral.rate_at(threshold) == pytest.approx(share, abs=0.01)
        assert deferral_rate(window_from(curves.deferral, 500), threshold) == pytest.approx(
            share, abs=0.01
        )
    ends = curves.quality.score_at(0), curves.quality.score_at(1)
    assert ends == pytest.approx((light.mean(), heavy.mean()))


def test_the_area_and_the_error_are_what_they_are_by_hand() -> None:
    outcomes = np.array([False, True, False, True])
    assert area_under_curve(np.array([0.1, 0.4, 0.4, 0.9]), outcomes) == 0.875
    sure = np.repeat([0.2, 0.8], 100)
    right = np.concatenate([np.arange(100) < 20, np.arange(100) < 70])
    assert calibration_error(sure, right, bins=2) == pytest.approx(0.05)
