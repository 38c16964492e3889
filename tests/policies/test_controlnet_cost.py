"""What ControlNets add to a step is told by steps with and without them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.costs.cost_learning import (
    MEMORY,
    StepHistory,
    fitted_work,
    observe_step,
    refitted_cost,
    remote_controlnet_share,
)
from ray_cluster.policies.costs.cost_model import (
    ExtraWork,
    StepWork,
    TimedStep,
    alone_s,
    control_share,
    step_s,
)
from ray_cluster.policies.types import StepCost
from tests.fakes import request_view

MEASURED = StepCost(0.02, 1.0, control_share=0.05)
SIDES = (64, 96, 128)

Rows = Sequence[tuple[int, int]]
"""Side in pixels and number of ControlNets of each."""


def work_of(rows: Rows) -> StepWork:
    megapixels = [side * side / 1e6 for side, _ in rows]
    nets = [num for _, num in rows]
    extra = ExtraWork(
        sum(num * one for num, one in zip(nets, megapixels, strict=True)),
        sum(num * one**2 for num, one in zip(nets, megapixels, strict=True)),
    )
    num_sizes = len(set(megapixels))
    return StepWork(
        sum(megapixels),
        sum(one**2 for one in megapixels),
        num_sizes,
        extra if any(nets) else None,
    )


def drawn(rng: random.Random, nets: Sequence[int] = (0, 1, 2)) -> Rows:
    return [(rng.choice(SIDES), rng.choice(nets)) for _ in range(rng.randint(1, 8))]


def learnt(
    true: StepCost, batches: Iterable[Rows], noise: float, measured: StepCost = MEASURED
) -> StepCost:
    """Return the cost after steps, as a replica learns it."""
    rng, history, cost = random.Random(7), StepHistory(), measured
    for number, rows in enumerate(batches, 1):
        work = work_of(rows)
        seconds = step_s(true, work) * max(0.2, rng.gauss(1, noise))
        step = TimedStep(fitted_work(measured, work), seconds)
        history = observe_step(history, step, cost)
        if number % 4 == 0:
            cost = refitted_cost(measured, history)
    return cost


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.5])
@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_the_share_is_learnt_and_rows_without_cost_no_more(share: float, speed: float) -> None:
    rng = random.Random(1)
    true = StepCost(0.02 * speed, speed, control_share=share)
    found = learnt(true, [drawn(rng) for _ in range(3 * MEMORY)], noise=0.1)
    assert found.control_share == pytest.approx(share, abs=0.08)
    for rows in ([(64, 0)], [(96, 0)] * 4, [(128, 0)] * 8):
        plain = step_s(found, work_of(rows)) * speed / step_s(true, work_of(rows))
        assert plain == pytest.approx(1, abs=0.1)


def test_within_some_ten_steps_the_first_guess_counts_no_more() -> None:
    rng = random.Random(2)
    true = replace(MEASURED, control_share=0.6)
    found = learnt(true, [drawn(rng) for _ in range(24)], noise=0.05)
    assert found.control_share == pytest.approx(0.6, abs=0.15)


def test_squares_of_large_rows_are_part_of_the_share() -> None:
    rng = random.Random(3)
    measured = replace(MEASURED, per_squared_megapixel_s=20.0)
    true = replace(measured, control_share=0.5)
    found = learnt(true, [drawn(rng) for _ in range(3 * MEMORY)], 0.05, measured)
    assert found.control_share == pytest.approx(0.5, abs=0.08)


def test_steps_without_controlnets_leave_the_share_alone() -> None:
    rng = random.Random(4)
    plain = [drawn(rng, (0,)) for _ in range(100)]
    assert learnt(StepCost(0.06, 1.2), plain, 0.1).control_share == MEASURED.control_share


def test_a_share_that_has_not_been_seen_for_long_is_the_first_guess_again() -> None:
    rng = random.Random(5)
    true = replace(MEASURED, control_share=0.6)
    batches = [drawn(rng) for _ in range(200)] + [drawn(rng, (0,)) for _ in range(2000)]
    assert learnt(true, batches, 0.05).control_share == MEASURED.control_share


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(SIDES), st.integers(0, 3)), min_size=1, max_size=8),
            st.floats(1e-3, 10),
        ),
        min_size=1,
        max_size=30,
    ),
    st.sampled_from([0.0, 0.05, 1.0]),
)
def test_whatever_is_seen_the_share_is_not_negative(
    seen: list[tuple[list[tuple[int, int]], float]], prior: float
) -> None:
    history, measured = StepHistory(), replace(MEASURED, control_share=prior)
    for rows, seconds in seen:
        step = TimedStep(fitted_work(measured, work_of(rows)), seconds)
        history = observe_step(history, step, measured)
    found = refitted_cost(measured, history)
    assert 0 <= found.control_share < 1e6
    assert min(found.fixed_s, found.per_megapixel_s) > 0


def test_loras_and_masks_are_priced_by_what_was_measured_and_controlnets_stay_apart() -> None:
    cost = replace(MEASURED, lora_share=0.5, spared_share=0.5)
    extra = ExtraWork(0.3, 0.02, lora_megapixels=0.2, spared_megapixels=0.1)
    kept = fitted_work(cost, StepWork(1.0, 0.1, 2, extra))
    assert kept == StepWork(1.0 + 0.1 - 0.05, 0.1, 2, ExtraWork(0.3, 0.02))
    assert fitted_work(cost, StepWork(1.0, 0.1)) == StepWork(1.0, 0.1)


def test_the_measured_share_is_what_steps_with_controlnets_take_more() -> None:
    cost = StepCost(0.3, 2.0, per_squared_megapixel_s=0.5, control_share=0.25)
    works = [work_of([(640, 1)]), work_of([(1024, 1)] * 4), work_of([(1024, 3), (512, 0)])]
    # one model call for all sizes
    steps = [TimedStep(work, step_s(replace(cost), work)) for work in works]
    assert control_share(replace(cost, control_share=0.9), steps) == pytest.approx(0.25)
    assert control_share(cost, [TimedStep(works[0], 1e-3)]) == 0
    priced, blind = request_view("a", controls=("edges",)), request_view("a")
    assert alone_s(cost, priced) > alone_s(cost, blind)


def test_elsewhere_a_controlnet_adds_what_outlasts_the_first_half_and_the_way() -> None:
    cost = StepCost(0.02, 0.1)
    share = remote_controlnet_share(cost, (1024, 1024), 4)
    work = work_of([(1024, 1)] * 4)
    alone, with_it = (step_s(replace(cost, control_share=one), work) for one in (0.0, share))
    assert with_it - alone == pytest.approx(0.1 * 0.45 * alone + 0.001)
    # small images: the way counts more
    assert remote_controlnet_share(cost, (64, 64), 1) > share
