"""Thresholds defer what they are meant to, by rate and by a request's slack."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.cascade import (
    NO_HURRY,
    ConfidenceWindow,
    DeferralCurve,
    QualityCurve,
    Slack,
    cascade_entry,
    decide_deferral,
    decide_unscored,
    deferral_rate,
    given_up_s,
    needs_slack,
    observe,
    request_threshold,
    threshold_for,
    window_from,
)
from ray_cluster.policies.planning.plan import CascadePlan
from ray_cluster.policies.types import CascadeEntry
from tests.policies.cascades import DEFERRALS, FID

shares = st.floats(0, 1)
windows = st.lists(shares, min_size=1, max_size=40).map(lambda some: ConfidenceWindow((*some,), 40))


def test_quality_is_best_between_the_models_and_worse_with_the_heavy_one_alone() -> None:
    assert FID.best_rate == 0.6
    assert FID.score_at(0.6) == 16.79
    assert FID.score_at(1.0) == 18.55
    assert FID.score_at(0.55) == pytest.approx((16.79 + 16.95) / 2)
    assert FID.gains[0] == 0
    assert max(FID.gains) == pytest.approx(22.77 - 16.79)


def test_a_score_may_rise_with_quality() -> None:
    curve = QualityCurve((0.0, 0.5, 1.0), (0.2, 0.6, 0.5), lower_is_better=False)
    assert curve.best_rate == 0.5
    assert curve.gains[-1] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("rates", "scores"),
    [((0.0,), (1.0,)), ((0.1, 1.0), (1, 2)), ((0, 0), (1, 2)), ((0, 2), (1, 2))],
)
def test_quality_curves_that_are_none_are_refused(
    rates: tuple[float, ...], scores: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="given"):
        QualityCurve(rates, scores)


def test_deferral_curves_that_are_no_distribution_are_refused() -> None:
    with pytest.raises(ValueError, match="rises from"):
        DeferralCurve((0.0, 0.5, 1.0), (0.0, 1.2, 1.0))


@given(shares)
def test_thresholds_of_a_curve_are_the_inverse_of_its_rates(rate: float) -> None:
    assert DEFERRALS.rate_at(DEFERRALS.threshold_for(rate)) == pytest.approx(rate)


@given(windows, shares)
def test_a_threshold_defers_as_much_as_wanted_and_no_more(
    window: ConfidenceWindow, rate: float
) -> None:
    threshold = threshold_for(window, rate)
    assert deferral_rate(window, threshold) <= rate + 1e-9
    # the next higher threshold would defer too many
    above = [one for one in window.confidences if one >= threshold]
    if above:
        assert deferral_rate(window, math.nextafter(min(above), 2)) > rate


@pytest.mark.parametrize("size", [1, 2, 7, 100, 512])
def test_a_seeded_window_defers_like_its_curve(size: int) -> None:
    window = window_from(DEFERRALS, size)
    for threshold in (0.05, 0.2, 0.4):
        found = deferral_rate(window, threshold)
        assert found == pytest.approx(DEFERRALS.rate_at(threshold), abs=1 / size)
    # also when half of it is gone
    half = ConfidenceWindow(window.confidences[size // 2 :], size)
    assert deferral_rate(half, 0.1) == pytest.approx(0.449, abs=4 / size + 0.01)


def test_the_threshold_follows_prompts_that_become_harder() -> None:
    rng = random.Random(0)
    window = window_from(DEFERRALS, 500)
    before = threshold_for(window, 0.4)
    harder = [0.5 * DEFERRALS.threshold_for(rng.random()) for _ in range(500)]
    for start in range(0, 500, 50):
        window = observe(window, harder[start : start + 50])
    assert len(window.confidences) == 500
    # of all harder prompts, and not only of those that were seen
    assert DEFERRALS.rate_at(2 * threshold_for(window, 0.4)) == pytest.approx(0.4, abs=0.06)
    assert DEFERRALS.rate_at(2 * before) > 0.45


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 3"):
        ConfidenceWindow((), 3)


def test_without_a_heavy_replica_nothing_is_deferred() -> None:
    plan = CascadePlan("s", math.inf, reserve_s=0.5, idle_threshold=math.inf)
    assert request_threshold(plan, Slack(-math.inf, 4.0)) == 0.0


idle_thresholds = st.one_of(st.none(), shares, st.just(math.inf))


@given(shares, idle_thresholds, st.floats(-10, 10), st.floats(-10, 10), st.floats(0, 2))
def test_a_request_without_slack_stays_and_one_with_enough_is_treated_as_any(
    threshold: float, idle: float | None, present_s: float, idle_s: float, reserve_s: float
) -> None:
    plan = CascadePlan("s", threshold, reserve_s=reserve_s, idle_threshold=idle)
    found = request_threshold(plan, Slack(present_s, idle_s))
    assert 0 <= found <= max(threshold, idle or 0.0)
    if present_s < 0:
        assert found == 0
    elif present_s >= reserve_s:
        assert found >= threshold
        if idle is None or present_s <= idle_s / 2:
            assert found == threshold
        elif present_s >= idle_s > 0:
            assert found == max(threshold, idle)


def test_half_the_reserve_halves_the_threshold() -> None:
    assert request_threshold(CascadePlan("s", 0.4, reserve_s=1.0), Slack(0.5, 9.0)) == 0.2
    assert request_threshold(CascadePlan("s", math.inf, reserve_s=1.0), Slack(0.5, 9.0)) == 0.5


@pytest.mark.parametrize(
    ("present_s", "idle", "threshold"),
    [
        (4.0, 0.8, 0.8),
        (3.0, 0.8, 0.5),
        (2.0, 0.8, 0.2),
        (1.0, 0.8, 0.2),
        (0.25, 0.8, 0.1),
        # slower than it is alone by what was predicted last: as good as idle
        (4.5, 0.8, 0.8),
        (4.0, math.inf, math.inf),
        (3.0, math.inf, 0.6),
        (4.0, 0.1, 0.2),
        (4.0, None, 0.2),
    ],
)
def test_the_threshold_rises_as_the_heavy_model_has_less_to_do(
    present_s: float, idle: float | None, threshold: float
) -> None:
    plan = CascadePlan("s", 0.2, reserve_s=0.5, idle_threshold=idle)
    assert request_threshold(plan, Slack(present_s, 4.0)) == pytest.approx(threshold)


@given(shares, shares, st.tuples(st.floats(0, 4), st.floats(0, 4)))
def test_more_slack_never_lowers_a_threshold(
    threshold: float, idle: float, slacks_s: tuple[float, float]
) -> None:
    plan = CascadePlan("s", threshold, reserve_s=0.5, idle_threshold=idle)
    less, more = (request_threshold(plan, Slack(one, 4.0)) for one in sorted(slacks_s))
    assert less <= more + 1e-12


def test_a_threshold_rises_only_by_a_slack_that_tells_of_the_queue() -> None:
    plan = CascadePlan("s", 0.2, reserve_s=0.5, idle_threshold=0.8)
    assert request_threshold(plan, NO_HURRY) == 0.2
    # it would be late even alone, so that nothing is known of the queue either
    assert request_threshold(plan, Slack(0.5, -1.0)) == 0.2
    blind = CascadePlan("s", 0.2, reserve_s=None, idle_threshold=0.8)
    assert request_threshold(blind, Slack(4.0, 4.0)) == 0.2


@pytest.mark.parametrize(
    ("addons", "is_edit", "supported", "entry"),
    [
        ((), False, (), "light"),
        (("lora-1",), False, (), "heavy"),
        (("lora-1",), False, ("lora-1",), "light"),
        (("lora-1", "canny"), False, ("lora-1",), "heavy"),
        ((), True, (), "heavy"),
        ((), True, ("mask",), "light"),
    ],
)
def test_only_what_the_light_model_supports_enters_the_cascade(
    addons: tuple[str, ...], is_edit: bool, supported: tuple[str, ...], entry: str
) -> None:
    assert cascade_entry(addons, supported, is_edit=is_edit) == entry


@pytest.mark.parametrize(
    ("plan", "confidence", "slack_s", "reason"),
    [
        (CascadePlan("s", 0.5), 0.5, 9.0, "confident"),
        (CascadePlan("s", 0.5), 0.4, -1.0, "deferred"),
        (CascadePlan("s", 0.5, reserve_s=1.0), 0.4, 9.0, "deferred"),
        (CascadePlan("s", 0.5, reserve_s=1.0), 0.4, 0.5, "no_time"),
        (CascadePlan("s", 0.5, reserve_s=1.0), 0.2, 0.5, "deferred"),
        (CascadePlan("s", 0.5, reserve_s=0.0), 0.4, -0.1, "no_time"),
        (CascadePlan("s", 0.5, reserve_s=1.0), 0.5, -0.1, "confident"),
        (CascadePlan("s", math.inf, reserve_s=0.0), 1.0, 0.0, "deferred"),
        (CascadePlan("s", 0.2, reserve_s=0.5, idle_threshold=0.8), 0.7, 9.5, "deferred"),
        # it would be worth it where there is nothing else to do
        (CascadePlan("s", 0.2, reserve_s=0.5, idle_threshold=0.8), 0.7, 5.0, "no_time"),
        (CascadePlan("s", 0.2, reserve_s=0.5, idle_threshold=0.8), 0.8, 9.9, "confident"),
        (CascadePlan("s", 0.2, reserve_s=0.5, idle_threshold=0.8), 0.19, 0.1, "no_time"),
        (CascadePlan("s", 0.5, routing="random", heavy_share=1.0), 0.0, 9.0, "random_routing"),
    ],
)
def test_a_light_image_is_deferred_below_the_threshold_that_its_slack_allows(
    plan: CascadePlan, confidence: float, slack_s: float, reason: str
) -> None:
    found = decide_deferral(plan, confidence, Slack(slack_s, 10.0))
    assert (found.is_deferred, found.reason) == (reason == "deferred", reason)


plans = st.builds(
    CascadePlan,
    st.just("s"),
    st.sampled_from([0.0, 0.3, 1.0, math.inf]),
    routing=st.sampled_from(["confidence", "random"]),
    reserve_s=st.sampled_from([None, 0.0, 1.0]),
    idle_threshold=st.sampled_from([None, 0.1, 0.6, math.inf]),
)


@given(plans, shares, st.floats(-10, 10))
def test_slack_is_needed_wherever_a_decision_depends_on_it(
    plan: CascadePlan, confidence: float, slack_s: float
) -> None:
    if not needs_slack(plan, confidence):
        found = decide_deferral(plan, confidence, Slack(slack_s, 10.0))
        assert found == decide_deferral(plan, confidence)


@pytest.mark.parametrize(
    ("wanted", "slack_s", "is_deferred", "reason"),
    [
        ("light", 9.0, False, "scorer_away"),
        ("heavy", 0.0, True, "scorer_away"),
        ("heavy", -0.1, False, "no_time"),
    ],
)
def test_without_a_score_the_heavy_model_is_used_only_if_it_is_wanted_and_in_time(
    wanted: CascadeEntry, slack_s: float, is_deferred: bool, reason: str
) -> None:
    found = decide_unscored(wanted, slack_s)
    assert (found.is_deferred, found.reason) == (is_deferred, reason)


@pytest.mark.parametrize(("told_s", "at_s"), [(None, 7.0), (6.0, 9.95), (8.0, -math.inf)])
def test_a_heavy_image_is_given_up_when_it_cannot_be_in_time(
    told_s: float | None, at_s: float
) -> None:
    assert given_up_s(10.0, 3.0, told_s) == pytest.approx(at_s)
