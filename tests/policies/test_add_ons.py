"""LoRAs are merged when it pays, never at more than twice the best cost, and never over others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.steps.lora_merging import (
    MARGIN,
    MOST_FORESEEN,
    MergedRun,
    MergeView,
    decide_merge,
    foreseen_steps,
    merging_saves_s,
)

RUN = MergedRun(step_s=1.0, make_s=3.0, swap_s=0.5)
DELTA_S = 1.0
# no forecast: what comes next is not known
BLIND = MergeView(is_merged=False, run=RUN, delta_s=DELTA_S, share=0.0)
Steps = Sequence[bool]
"""Whether the rows of each step all have the set."""


def extra_s(steps: Steps, merges: Sequence[bool], make_s: float = 3.0) -> float:
    """Seconds beyond those of steps without LoRAs, if before each step it is merged or not.

    Each merge makes the weights anew.
    """
    total_s, was_merged = 0.0, False
    for is_alone, is_merged in zip(steps, merges, strict=True):
        assert is_alone or not is_merged
        total_s += 0.0 if is_merged or not is_alone else DELTA_S
        total_s += make_s + RUN.swap_s if is_merged and not was_merged else 0.0
        was_merged = is_merged
    return total_s


def best_s(steps: Steps, make_s: float = 3.0) -> float:
    """The least of all ways, tried one by one."""
    ways = itertools.product(*[(False, True) if alone else (False,) for alone in steps])
    return min(extra_s(steps, way, make_s) for way in ways)


def decided(steps: Steps, view: MergeView) -> list[bool]:
    """What the policy does, step by step, knowing only the past."""
    merges: list[bool] = []
    is_merged, paid_s = False, 0.0
    for is_alone in steps:
        others = not is_alone
        if is_merged and decide_merge(replace(view, is_merged=True, num_others=others)) != "stay":
            is_merged, paid_s = False, 0.0
        if others:
            paid_s = 0.0
        elif not is_merged:
            is_merged = decide_merge(replace(view, paid_s=paid_s)) == "merge"
            paid_s += 0.0 if is_merged else DELTA_S
        merges.append(is_merged)
    return merges


@pytest.mark.parametrize("length", [1, 4, 9])
def test_without_a_forecast_no_future_makes_it_cost_more_than_twice_the_best(length: int) -> None:
    for steps in itertools.product((True, False), repeat=length):
        runs = 1 + sum(not one for one in steps)
        # a run that ends is found out one step late at most
        assert extra_s(steps, decided(steps, BLIND)) <= 2 * best_s(steps) + DELTA_S * runs
    # and the bound is a tight one: merged just before the run ends
    worst = [True] * 5 + [False]
    assert extra_s(worst, decided(worst, BLIND)) >= 1.5 * best_s(worst)


@given(length=st.integers(1, 12), delta_s=st.floats(0.0, 2.0), make_s=st.floats(0.0, 10.0))
def test_with_the_right_forecast_it_is_what_brute_force_finds(
    length: int, delta_s: float, make_s: float
) -> None:
    run = replace(RUN, make_s=make_s)
    view = MergeView(is_merged=False, run=run, delta_s=delta_s, share=0.0, steps_left=length)
    never_s, now_s = length * delta_s, run.price_s
    if never_s >= 1.01 * MARGIN * now_s:
        assert decide_merge(view) == "merge"
    elif never_s <= 0.99 * MARGIN * now_s:
        assert decide_merge(view) == "stay"
    saved_s = merging_saves_s(length, run.step_s + delta_s, [run])
    assert saved_s == pytest.approx(never_s - now_s, abs=1e-9)


def test_random_traffic_costs_little_more_than_the_best_and_less_than_never_or_always() -> None:
    rng = np.random.default_rng(0)

    @cache
    def totals(share: float) -> tuple[float, float, float]:
        found = np.zeros(3)
        for _ in range(40):
            steps = tuple(bool(one) for one in rng.random(12) < share)
            view = replace(BLIND, share=share, steps_left=1.0, steps_per_request=1.0)
            own_s = extra_s(steps, decided(steps, view))
            found += (own_s, best_s(steps), extra_s(steps, [False] * len(steps)))
        return tuple(found)  # type: ignore[return-value]

    for share in (0.1, 0.5, 0.8, 0.95, 1.0):
        own_s, least_s, never_s = totals(share)
        assert own_s <= 1.5 * least_s, share
        assert own_s <= 1.05 * never_s, share
    own_s, least_s, never_s = totals(1.0)
    assert own_s <= 1.05 * least_s < 0.5 * never_s


def test_requests_of_other_sets_come_first() -> None:
    sure = replace(BLIND, share=1.0, steps_left=1000.0, paid_s=1000.0)
    assert decide_merge(sure) == "merge"
    assert decide_merge(replace(sure, num_others=1)) == "stay"
    merged = replace(sure, is_merged=True)
    assert decide_merge(merged) == "stay"
    assert decide_merge(replace(merged, num_others=1)) == "unmerge"


def test_what_saves_nothing_is_not_merged_and_a_little_noise_changes_nothing() -> None:
    sure = replace(BLIND, share=1.0, steps_left=1000.0, paid_s=1000.0)
    assert decide_merge(replace(sure, delta_s=0.0)) == "stay"
    merged = replace(sure, is_merged=True)
    assert decide_merge(replace(merged, delta_s=-0.04)) == "stay"
    assert decide_merge(replace(merged, delta_s=-0.06)) == "unmerge"


def test_what_comes_next_is_foreseen_by_the_latest_requests() -> None:
    view = replace(BLIND, steps_left=3.0, steps_per_request=2.0)
    assert foreseen_steps(view) == 3.0
    assert foreseen_steps(replace(view, share=0.5)) == 5.0
    assert foreseen_steps(replace(view, share=0.9)) == pytest.approx(3.0 + 9 * 2.0)
    assert foreseen_steps(replace(view, share=1.0)) == 3.0 + MOST_FORESEEN * 2.0


def test_sets_one_after_the_other_pay_for_each_of_them() -> None:
    together_s, alone = 2.0, MergedRun(step_s=0.9, make_s=1.0, swap_s=0.0)
    # two of them save 0.2 a step and cost 2
    assert merging_saves_s(10, together_s, [alone, alone]) == pytest.approx(0.0)
    assert merging_saves_s(20, together_s, [alone, alone]) == pytest.approx(2.0)
    assert merging_saves_s(20, together_s, [alone] * 3) < 0
