import numpy as np
import pytest

from benchmarks.stats import paired_ratio, percentile, summarise


def test_summary_is_the_median_and_the_range_of_its_samples() -> None:
    summary = summarise([3.0, 1.0, 2.0, 10.0])
    assert (summary.median, summary.low, summary.high) == (2.5, 1.0, 10.0)
    assert summary.samples == (3.0, 1.0, 2.0, 10.0)


def test_interval_holds_the_median_and_lies_within_the_range() -> None:
    summary = summarise([float(value) for value in range(30)])
    low, high = summary.ci95
    assert summary.low <= low <= summary.median <= high <= summary.high
    # the 95 % interval of the median of 30 ordered samples is about ranks 10 to 21
    assert 7 <= low <= 12
    assert 17 <= high <= 22


def test_interval_is_narrower_for_steadier_samples() -> None:
    steady = summarise([1.0, 1.01, 0.99, 1.0, 1.02, 0.98])
    noisy = summarise([1.0, 1.5, 0.5, 1.0, 1.9, 0.2])
    assert np.ptp(steady.ci95) < np.ptp(noisy.ci95)


def test_same_samples_give_the_same_interval() -> None:
    samples = [0.3, 0.1, 0.7, 0.2]
    assert summarise(samples) == summarise(samples)


def test_single_sample_is_its_own_interval() -> None:
    summary = summarise([4.0])
    assert {summary.median, summary.low, summary.high, *summary.ci95} == {4.0}


def test_paired_ratio_is_immune_to_what_slows_both_sides() -> None:
    slowdown = [1.0, 5.0, 2.0, 9.0]
    ratio = paired_ratio([3.0 * s for s in slowdown], [1.5 * s for s in slowdown])
    assert ratio.low == ratio.high == ratio.median == pytest.approx(2.0)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_summary_refuses_what_is_no_measurement(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        summarise(samples)


@pytest.mark.parametrize(("first", "second"), [([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_paired_ratio_refuses_what_is_no_pair(first: list[float], second: list[float]) -> None:
    with pytest.raises(ValueError, match=r"denominator"):
        paired_ratio(first, second)


def test_summary_for_json_keeps_every_sample_to_four_digits() -> None:
    figures = summarise([1 / 3, 2.0]).as_dict()
    assert figures["samples"] == [0.3333, 2.0]
    assert figures["n"] == 2


def test_percentile_interpolates() -> None:
    assert percentile([0.0, 1.0, 2.0, 3.0, 4.0], 95) == pytest.approx(3.8)
