"""The study of predicted ends counts what it says."""

from __future__ import annotations

import pytest

from benchmarks.prediction.study import Ended, Mix, draw_trace, figures


def test_errors_refusals_and_false_refusals_are_told_apart() -> None:
    ended = [
        Ended(True, 10.0, predicted_s=8.0, took_s=10.0),
        Ended(True, 10.0, predicted_s=11.0, took_s=11.0),
        Ended(False, 10.0),
        Ended(False, 10.0),
    ]
    unrefused = [Ended(True, 10.0, 9.0, took) for took in (9.0, 9.0, 9.0, 30.0)]
    found = figures(ended, unrefused)
    assert found["error_median"] == pytest.approx(10)
    names = ("refused", "late", "false_refusals", "in_time")
    assert [found[name] for name in names] == [50, 50, 25, 25]
    with pytest.raises(ValueError, match="no prediction"):
        figures([Ended(False, 1.0)], [Ended(True, 1.0, 1.0, 1.0)])


def test_traces_come_at_their_rate_with_deadlines_of_five_times_alone() -> None:
    mix = Mix("mixed", (64, 96, 128), (10, 30))
    trace = draw_trace(mix, 4000, rate_per_s=2.0, alone_s=lambda one: 0.1 * one.num_steps, seed=3)
    assert trace[-1].at_s == pytest.approx(2000, rel=0.1)
    assert {one.side_px for one in trace} == set(mix.sides_px)
    assert {one.num_steps for one in trace} == set(range(10, 31))
    assert all(one.slo_s == pytest.approx(0.5 * one.num_steps) for one in trace)
