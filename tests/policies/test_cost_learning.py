"""What steps tell of the terms of their cost."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.costs import cost_learning
from ray_cluster.policies.costs.cost_learning import (
    StepHistory,
    clipped_s,
    observe_step,
    refitted_cost,
)
from ray_cluster.policies.costs.cost_model import StepWork, TimedStep, step_s
from ray_cluster.policies.types import StepCost

MEASURED = StepCost(0.02, 1.0, decode_per_megapixel_s=3.0, per_further_size_s=0.0)
SIDES = (64, 96, 128)


def work_with(sides: Iterable[int]) -> StepWork:
    megapixels = [side * side / 1e6 for side in sides]
    return StepWork(sum(megapixels), sum(one**2 for one in megapixels), len(set(megapixels)))


def drawn(rng: random.Random) -> StepWork:
    return work_with(rng.choices(SIDES, k=rng.randint(1, 8)))


def history_of(true: StepCost, works: Iterable[StepWork], noise: float = 0.0) -> StepHistory:
    rng, history = random.Random(1), StepHistory()
    for work in works:
        seconds = step_s(true, work) * rng.gauss(1.0, noise)
        history = observe_step(history, TimedStep(work, seconds), MEASURED)
    return history


def worst(cost: StepCost, true: StepCost) -> float:
    """How far off the cost is for some batches, but for the level, which is not its affair."""
    works = [work_with([side] * count) for side in SIDES for count in (1, 8)]
    works += [work_with(SIDES), work_with(SIDES * 2)]
    ratios = [step_s(cost, one) / step_s(true, one) for one in works]
    return max(ratios) / min(ratios) - 1


@pytest.mark.parametrize("speed", [0.25, 1.0, 5.0])
@pytest.mark.parametrize(
    "true",
    [
        StepCost(0.02, 1.0, per_further_size_s=0.015),
        StepCost(0.04, 0.7),
        StepCost(0.01, 1.6, per_further_size_s=0.004),
        StepCost(0.02, 0.8, per_squared_megapixel_s=20.0, per_further_size_s=0.01),
    ],
)
def test_terms_are_told_by_batches_that_differ(true: StepCost, speed: float) -> None:
    rng = random.Random(2)
    true = replace(
        true,
        **{
            name: speed * getattr(true, name)
            for name in (
                *("fixed_s", "per_megapixel_s"),
                *("per_squared_megapixel_s", "per_further_size_s"),
            )
        },
    )
    history = history_of(true, [drawn(rng) for _ in range(200)], noise=0.1)
    before, after = worst(MEASURED, true), worst(refitted_cost(MEASURED, history), true)
    assert before > 0.25
    assert after < 0.12
    # decoding is none of a step's terms
    assert refitted_cost(MEASURED, history).decode_per_megapixel_s == 3.0


def test_batches_that_are_all_alike_leave_the_terms_as_they_were_measured() -> None:
    alike = [work_with([96, 96])] * 300
    learnt = refitted_cost(MEASURED, history_of(StepCost(0.06, 3.0), alike, noise=0.1))
    assert learnt.fixed_s == pytest.approx(MEASURED.fixed_s, rel=0.02)
    assert learnt.per_megapixel_s == pytest.approx(MEASURED.per_megapixel_s, rel=0.02)
    assert refitted_cost(MEASURED, StepHistory()) == MEASURED


def test_one_call_for_each_size_tells_of_the_fixed_part_and_not_of_further_sizes() -> None:
    rng, history = random.Random(3), StepHistory()
    measured = replace(MEASURED, per_further_size_s=0.05)
    for _ in range(200):
        work = drawn(rng)
        seconds = 0.03 * work.num_sizes + 1.0 * work.megapixels
        history = observe_step(
            history, TimedStep(work, seconds), MEASURED, num_calls=work.num_sizes
        )
    learnt = refitted_cost(measured, history)
    assert learnt.fixed_s / learnt.per_megapixel_s == pytest.approx(0.03, rel=0.03)
    level = learnt.per_megapixel_s / measured.per_megapixel_s
    # as it was measured, beside the others as they turned out
    assert 0.5 < learnt.per_further_size_s / measured.per_further_size_s / level < 2


@pytest.mark.parametrize(("seconds", "counted"), [(0.1, 0.5), (0.7, 0.7), (1.5, 1.5), (30.0, 2.0)])
def test_a_stall_counts_as_the_double_of_what_was_expected(seconds: float, counted: float) -> None:
    assert clipped_s(seconds, expected_s=1.0) == counted


def test_later_steps_count_more() -> None:
    rng = random.Random(4)
    works = [drawn(rng) for _ in range(400)]
    old, new = StepCost(0.02, 1.0, per_further_size_s=0.02), StepCost(0.05, 0.6)
    history = history_of(old, works)
    for work in works:
        history = observe_step(history, TimedStep(work, step_s(new, work)), MEASURED)
    assert worst(refitted_cost(MEASURED, history), new) < 0.1
    assert worst(refitted_cost(MEASURED, history), old) > 0.3


SEEN = st.lists(
    st.tuples(st.lists(st.sampled_from(SIDES), min_size=1, max_size=8), st.floats(1e-3, 10)),
    min_size=1,
    max_size=30,
)


@given(SEEN)
def test_whatever_is_seen_no_term_is_negative_and_steps_take_time(
    seen: list[tuple[list[int], float]],
) -> None:
    history = StepHistory()
    for sides, seconds in seen:
        history = observe_step(history, TimedStep(work_with(sides), seconds), MEASURED)
    learnt = refitted_cost(MEASURED, history)
    terms = (learnt.fixed_s, learnt.per_megapixel_s, learnt.per_further_size_s)
    assert all(0 <= one < 1e6 for one in (*terms, learnt.per_squared_megapixel_s))
    assert all(step_s(learnt, work_with(sides)) > 0 for sides, _ in seen)
    # nothing is told by steps that took no time
    assert observe_step(history, TimedStep(work_with([64]), 0.0), MEASURED) == history


def test_what_has_not_been_seen_for_long_is_as_it_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a short memory, so that sums fade as far as numbers go
    monkeypatch.setattr(cost_learning, "MEMORY", 16)
    rng = random.Random(5)
    true = StepCost(0.02, 1.0, per_further_size_s=0.03)
    measured = replace(MEASURED, per_further_size_s=0.004)
    history = history_of(true, [drawn(rng) for _ in range(200)])
    further = []
    for number in range(14_000):
        if number % 50 == 0:
            learnt = refitted_cost(measured, history)
            further.append(learnt.per_further_size_s / learnt.per_megapixel_s)
        work = work_with([rng.choice(SIDES)] * rng.randint(1, 8))
        step = TimedStep(work, step_s(true, work) * rng.gauss(1, 0.01))
        history = observe_step(history, step, MEASURED)
    # for a while what was learnt, then what was measured, and nothing else, however long it lasts
    assert all(0.015 < one < 0.035 for one in further[:2])
    assert further[-200:] == pytest.approx([0.004] * 200, rel=0.2)
    assert all(0.003 < one < 0.04 for one in further)
