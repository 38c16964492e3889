"""Demand is read from arrivals: it follows slopes, knows bursts and forgets peaks in time."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.planning.demand import (
    Demand,
    DemandSmoothing,
    count,
    forecast_per_s,
    quantile_per_s,
)

SMOOTHING = DemandSmoothing(level_s=10, slope_s=20, peak_s=60)


def counted(counts: list[int], every_s: float = 2.0) -> Demand:
    demand, total = Demand(0.0, 0), 0
    for number, new in enumerate(counts, 1):
        total += new
        demand = count(demand, number * every_s, total, SMOOTHING)
    return demand


def test_a_steady_rate_is_found_and_has_no_slope() -> None:
    demand = counted([20] * 60)
    assert demand.level_per_s == pytest.approx(10)
    assert forecast_per_s(demand, 60, SMOOTHING) == pytest.approx(10)
    assert demand.dispersion == 1


def test_a_slope_is_carried_on_where_an_average_would_be_late() -> None:
    # 0.1 requests/s more every second
    demand = counted([round(2 * (5 + 0.1 * 2 * n)) for n in range(100)])
    truth = 5 + 0.1 * 200
    assert demand.level_per_s == pytest.approx(truth, abs=0.6)
    assert forecast_per_s(demand, 10, SMOOTHING) == pytest.approx(truth + 1, abs=0.8)
    # and damped far ahead
    assert forecast_per_s(demand, 1e6, SMOOTHING) < truth + 0.1 * 100


def test_requests_that_stay_in_flight_do_not_change_it() -> None:
    # the same arrivals, whatever is still in the system
    assert counted([7] * 30).level_per_s == pytest.approx(3.5)


def test_bursts_are_told_from_poisson_arrivals() -> None:
    rng = random.Random(1)
    smooth = counted([sum(rng.random() < 0.01 for _ in range(2000)) for _ in range(300)])
    bursty = counted([(0, 40)[rng.random() < 0.5] for _ in range(300)])
    assert smooth.dispersion < 3
    assert bursty.dispersion > 10


def test_a_peak_is_remembered_for_a_while() -> None:
    assert counted([100] * 10 + [10] * 10).recent_peak_per_s == pytest.approx(50)
    assert counted([100] * 10 + [10] * 60).recent_peak_per_s < 7


def test_a_counter_that_starts_again_is_no_negative_demand() -> None:
    demand = count(counted([20] * 30), 62.0, 3, SMOOTHING)
    assert demand.level_per_s == pytest.approx(10)
    assert count(demand, 64.0, 23, SMOOTHING).level_per_s == pytest.approx(10)


def test_two_readings_at_one_instant_are_one() -> None:
    demand = counted([20] * 3)
    assert count(demand, demand.seen_s, demand.num_arrived + 5, SMOOTHING) == demand


def test_nothing_is_expected_before_a_count() -> None:
    assert forecast_per_s(Demand(0.0, 0), 10, SMOOTHING) == 0


@given(st.floats(0.1, 1e3), st.floats(1, 9), st.floats(0.5, 60))
def test_a_median_is_the_mean_and_a_higher_quantile_is_more(
    mean: float, dispersion: float, window_s: float
) -> None:
    assert quantile_per_s(mean, dispersion, window_s, 0.5) == pytest.approx(mean)
    high = quantile_per_s(mean, dispersion, window_s, 0.99)
    assert high > mean
    assert high > quantile_per_s(mean, dispersion, 2 * window_s, 0.99)


def test_a_quantile_covers_that_share_of_poisson_counts() -> None:
    rng = random.Random(2)
    level = quantile_per_s(20.0, 1.0, 5.0, 0.9)
    counts = [sum(rng.random() < 0.05 for _ in range(2000)) for _ in range(1000)]
    assert sum(one <= level * 5 for one in counts) / 1000 == pytest.approx(0.9, abs=0.04)


@pytest.mark.parametrize("quantile", [0.0, 1.0, -1.0])
def test_quantiles_that_are_none_are_refused(quantile: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        quantile_per_s(1, 1, 1, quantile)
