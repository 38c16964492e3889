"""What is allowed for wrong predictions follows what was seen."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.prediction_error import (
    PRIOR_RATIO,
    PROMISE_QUANTILE,
    WINDOW,
    PredictionError,
    observe_end,
)


def after(ratios: list[float]) -> PredictionError:
    error = PredictionError()
    for ratio in ratios:
        error = observe_end(error, predicted_s=2.0, took_s=2.0 * ratio)
    return error


def test_before_anything_was_seen_predictions_are_stretched() -> None:
    assert PredictionError().allowance == PRIOR_RATIO > 1


@given(st.lists(st.floats(0.1, 9), max_size=2 * WINDOW))
def test_the_allowance_is_the_quantile_of_the_latest_ratios(ratios: list[float]) -> None:
    error = after(ratios)
    assert len(error.ratios) <= WINDOW
    assert sorted(error.ratios) == list(error.ordered)
    if len(ratios) >= WINDOW:
        latest = sorted(ratios[-WINDOW:])
        assert error.ordered == pytest.approx(latest)
        assert error.allowance == error.ordered[int(PROMISE_QUANTILE * (WINDOW - 1))]


def test_what_is_no_duration_says_nothing() -> None:
    assert observe_end(PredictionError(), predicted_s=0.0, took_s=1.0) == PredictionError()
    assert observe_end(PredictionError(), predicted_s=1.0, took_s=0.0) == PredictionError()
    assert math.isfinite(after([1e9]).allowance)
