"""The plan of an edit's blocks against enumeration, and against the published greedy one."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.steps.edit_pipeline import (
    BlockTimes,
    EditPlan,
    plan_blocks,
    plan_blocks_greedily,
)

# sums of eighths are exact, so that equal plans are equal
times = st.integers(0, 40).map(lambda eighths: eighths / 8)
some_blocks = st.lists(st.builds(BlockTimes, times, times, times), max_size=9)


def run(blocks: list[BlockTimes], uses_cache: tuple[bool, ...]) -> EditPlan:
    """Play a plan through, the copy stream and the compute stream side by side."""
    copied: list[float] = []
    clock_s = 0.0
    for block, cached in zip(blocks, uses_cache, strict=True):
        if cached:
            clock_s += block.load_s
        copied.append(clock_s)
    computed_s = 0.0
    for block, cached, arrived_s in zip(blocks, uses_cache, copied, strict=True):
        if cached:
            computed_s = max(computed_s, arrived_s) + block.cached_s
        else:
            computed_s += block.whole_s
    return EditPlan(uses_cache, computed_s, clock_s)


@given(some_blocks)
def test_it_is_the_best_of_all_plans(blocks: list[BlockTimes]) -> None:
    plan = plan_blocks(blocks)
    every = [run(blocks, one) for one in itertools.product((False, True), repeat=len(blocks))]
    best = min(every, key=lambda one: (round(one.finish_s, 6), one.loaded_s))
    assert plan.finish_s == pytest.approx(best.finish_s, abs=1e-9)
    assert plan.loaded_s <= best.loaded_s + 1e-9
    assert run(blocks, plan.uses_cache) == plan


@given(some_blocks)
def test_it_is_never_worse_than_the_greedy_one_which_is_what_it_says(
    blocks: list[BlockTimes],
) -> None:
    greedy = plan_blocks_greedily(blocks)
    assert run(blocks, greedy.uses_cache) == greedy
    assert plan_blocks(blocks).finish_s <= greedy.finish_s + 1e-9


def test_the_greedy_plan_can_be_much_worse() -> None:
    # a long load that saves a little, before short ones that would save much
    blocks = [BlockTimes(9.0, 0.9, 10.0), *[BlockTimes(1.0, 0.1, 4.0)] * 4]
    greedy, best = plan_blocks_greedily(blocks), plan_blocks(blocks)
    assert greedy.uses_cache == (True,) * 5
    assert best.uses_cache == (False, True, True, True, True)
    assert greedy.finish_s / best.finish_s > 1.2


@pytest.mark.parametrize("load_s", [0.0, 1e6])
def test_free_loads_are_all_taken_and_endless_ones_are_not(load_s: float) -> None:
    plan = plan_blocks([BlockTimes(load_s, 1.0, 2.0)] * 30)
    assert plan.uses_cache == (load_s == 0,) * 30
    assert plan.finish_s == (30 if load_s == 0 else 60)


def test_no_blocks_take_no_time() -> None:
    assert plan_blocks([]) == plan_blocks_greedily([]) == EditPlan((), 0.0, 0.0)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        BlockTimes(1.0, bad, 1.0)


@pytest.mark.parametrize("same_loads", [True, False])
def test_as_many_blocks_as_real_models_have_are_planned(same_loads: bool) -> None:
    rng = random.Random(3)
    blocks = [
        BlockTimes(1.5 if same_loads else rng.uniform(0.5, 2.5), rng.uniform(0.5, 1), 2.0)
        for _ in range(70)
    ]
    # a search that kept every state would not end
    plan = plan_blocks(blocks)
    assert len(plan.uses_cache) == len(blocks)
    assert plan.finish_s <= plan_blocks_greedily(blocks).finish_s
