"""Arrivals have the rate and the burstiness that they are asked for."""

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad

from ray_cluster.simulator.arrivals import RateCurve, constant_rate, daily_rate, draw_arrivals

rates = st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 10.0]), min_size=2, max_size=6)


def gap_cv(instants_s: npt.NDArray[np.float64]) -> float:
    gaps = np.diff(instants_s)
    return float(gaps.std() / gaps.mean())


def curve_of(rates_per_s: list[float]) -> RateCurve:
    return RateCurve(tuple(float(2 * i) for i in range(len(rates_per_s))), tuple(rates_per_s))


@given(rates, st.floats(0, 1))
def test_instants_invert_the_integral_of_the_rate(rates_per_s: list[float], share: float) -> None:
    curve = curve_of(rates_per_s)
    count = share * curve.expected
    instant = float(curve.instants_of(np.array([count]))[0])
    assert 0 <= instant <= curve.duration_s
    knots = [t for t in curve.times_s if t < instant]
    pieces = zip([*knots, instant], [*knots[1:], instant], strict=False)
    integral = sum(quad(lambda t: float(curve.at(np.array([t]))[0]), a, b)[0] for a, b in pieces)
    assert integral == pytest.approx(count, abs=1e-6)


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 1.5, 3.0])
def test_a_constant_rate_has_its_mean_and_its_cv(cv: float) -> None:
    drawn = draw_arrivals(constant_rate(5.0, 4000.0), np.random.default_rng(1), cv=cv)
    assert bool((np.diff(drawn) >= 0).all())
    assert drawn[0] >= 0
    assert drawn[-1] <= 4000
    assert len(drawn) == pytest.approx(20000, abs=1 + 4 * cv * math.sqrt(20000))
    assert gap_cv(drawn) == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_counts_of_a_poisson_process_vary_as_they_should() -> None:
    curve = constant_rate(2.0, 10.0)
    counts = [len(draw_arrivals(curve, np.random.default_rng(seed))) for seed in range(600)]
    assert float(np.mean(counts)) == pytest.approx(20, abs=0.7)
    assert float(np.var(counts)) == pytest.approx(20, rel=0.25)


def test_bursts_begin_at_any_time_and_not_with_the_curve() -> None:
    curve = constant_rate(1.0, 20.0)
    drawn = [draw_arrivals(curve, np.random.default_rng(s), cv=2.0) for s in range(800)]
    early = np.mean([int((one < 4).sum()) for one in drawn])
    late = np.mean([int((one >= 16).sum()) for one in drawn])
    assert early == pytest.approx(4, abs=0.6)
    assert late == pytest.approx(4, abs=0.6)


def test_a_day_lies_between_its_rates_and_is_busier_by_day() -> None:
    day = daily_rate(4.0, 32.0, 350.0)
    assert (min(day.rates_per_s), max(day.rates_per_s)) == (4.0, 32.0)
    assert day.rates_per_s[0] == day.rates_per_s[-1]
    drawn = draw_arrivals(day, np.random.default_rng(2), cv=1.3)
    assert len(drawn) == pytest.approx(day.expected, rel=0.05)
    night = int(((drawn > 30) & (drawn < 90)).sum())
    noon = int(((drawn > 180) & (drawn < 240)).sum())
    assert noon > 4 * night


def test_times_without_arrivals_stay_empty() -> None:
    curve = RateCurve((0.0, 10.0, 10.5, 20.0, 20.5, 30.0), (5.0, 5.0, 0.0, 0.0, 5.0, 5.0))
    drawn = draw_arrivals(curve, np.random.default_rng(3))
    assert not ((drawn > 10.5) & (drawn < 20.0)).any()
    assert (drawn > 20.5).any()
    assert len(draw_arrivals(constant_rate(0.0, 5.0), np.random.default_rng(3))) == 0


def test_a_seed_fixes_everything() -> None:
    day = daily_rate(1.0, 3.0, 100.0)
    first, again, other = (draw_arrivals(day, np.random.default_rng(s), cv=1.2) for s in (4, 4, 5))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize(
    ("times", "given_rates", "message"),
    [
        ((0.0,), (1.0,), "two or more"),
        ((0.0, 1.0), (1.0,), "as many rates as times"),
        ((1.0, 2.0), (1.0, 1.0), "rise from 0"),
        ((0.0, 0.0), (1.0, 1.0), "rise from 0"),
        ((0.0, math.inf), (1.0, 1.0), "rise from 0"),
        ((0.0, 1.0), (1.0, -1.0), "not negative"),
        ((0.0, 1.0), (1.0, math.nan), "finite"),
    ],
)
def test_curves_that_are_none_are_refused(
    times: tuple[float, ...], given_rates: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RateCurve(times, given_rates)


def test_other_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="low <= high"):
        daily_rate(3.0, 2.0, 10.0)
    for cv in (-1.0, math.nan):
        with pytest.raises(ValueError, match="CV"):
            draw_arrivals(constant_rate(1.0, 1.0), np.random.default_rng(1), cv=cv)
