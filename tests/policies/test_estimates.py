"""What is allowed for wrong predictions follows what was seen."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.admission.estimates import (
    ARRIVAL_WINDOW,
    ERROR_WINDOW,
    PRIOR_RATIO,
    PROMISE_QUANTILE,
    Arrivals,
    PredictionError,
    StageTimes,
    faded_error,
    observe_arrivals,
    observe_end,
    observe_stages,
)
from tests.fakes import request_view


def after(ratios: list[float]) -> PredictionError:
    error = PredictionError()
    for ratio in ratios:
        error = observe_end(error, predicted_s=2.0, took_s=2.0 * ratio)
    return error


def test_before_anything_was_seen_predictions_are_stretched() -> None:
    assert PredictionError().safety_factor == PRIOR_RATIO > 1


@given(st.lists(st.floats(0.1, 9), max_size=2 * ERROR_WINDOW))
def test_the_allowance_is_the_quantile_of_the_latest_ratios(ratios: list[float]) -> None:
    error = after(ratios)
    assert len(error.ratios) <= ERROR_WINDOW
    assert sorted(error.ratios) == list(error.ordered)
    if len(ratios) >= ERROR_WINDOW:
        latest = sorted(ratios[-ERROR_WINDOW:])
        assert error.ordered == pytest.approx(latest)
        assert error.safety_factor == error.ordered[int(PROMISE_QUANTILE * (ERROR_WINDOW - 1))]


def test_a_spell_is_forgotten_by_later_completions_and_by_silence() -> None:
    spell = after([30.0] * ERROR_WINDOW)
    silences_s = [0.0, 30.0, 60.0, 120.0, 240.0, 3600.0]
    left = [faded_error(spell, silent_s, took_s=1.0) for silent_s in silences_s]
    assert [one.ratios.count(30.0) for one in left] == [64, 46, 32, 16, 4, 1]
    assert [one.safety_factor for one in left] == [30.0] * 4 + [PRIOR_RATIO] * 2
    # the latest ones are left
    mended = after([30.0] * ERROR_WINDOW + [1.0] * 10)
    assert mended.safety_factor == 30.0
    assert faded_error(mended, 120.0, took_s=1.0).safety_factor == 1.0
    # images that take an hour come once an hour
    assert faded_error(spell, 3600.0, took_s=3600.0).safety_factor == 30.0
    assert faded_error(PredictionError(), 3600.0, took_s=1.0) == PredictionError()


def test_what_is_no_duration_says_nothing() -> None:
    assert observe_end(PredictionError(), predicted_s=0.0, took_s=1.0) == PredictionError()
    assert observe_end(PredictionError(), predicted_s=1.0, took_s=0.0) == PredictionError()
    assert math.isfinite(after([1e9]).safety_factor)


def test_arrivals_give_a_rate_and_a_burst_is_forgotten() -> None:
    arrivals = Arrivals()
    assert arrivals.interval_s(0.0) == math.inf
    for number in range(ARRIVAL_WINDOW + 5):
        view = request_view(f"{number}", arrival_s=0.5 * number, deadline_s=0.5 * number + 7)
        arrivals = observe_arrivals(arrivals, [view])
    assert len(arrivals.recent) == ARRIVAL_WINDOW
    assert arrivals.recent[-1].deadline_s == 7
    last_s = 0.5 * (ARRIVAL_WINDOW + 4)
    assert arrivals.interval_s(last_s) == pytest.approx(0.5, rel=0.05)
    assert arrivals.interval_s(last_s + 100) > 3


def test_stage_times_follow_what_is_observed() -> None:
    times = StageTimes()
    for _ in range(100):
        times = observe_stages(times, encode_s=0.2, rest_s=-1.0)
    assert times.encode_s == pytest.approx(0.2)
    assert times.rest_s == 0.0
    for _ in range(100):
        times = observe_stages(times, encode_s=0.4, rest_s=0.3)
    assert times.encode_s == pytest.approx(0.4, rel=0.01)
    assert times.rest_s == pytest.approx(0.3, rel=0.01)
