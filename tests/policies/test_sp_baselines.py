"""The policies that ours is measured against do what they are known to do."""

from functools import partial
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.baselines.sp_knapsack import (
    KnapsackOptions,
    Option,
    cheapest_mix,
    choose_options,
    options_of,
    plan_knapsack,
)
from ray_cluster.policies.baselines.sp_static import StaticOptions, plan_moldable, plan_static
from ray_cluster.policies.baselines.sp_widest import plan_widest
from ray_cluster.policies.sequence_parallel.types import GroupRequest, Planner
from tests.policies.groups import LARGE, MIDDLE, SMALL, request, requests_strategy, view

MENU = (("small", 1), ("middle", 2), ("large", 4))
STATIC = StaticOptions(MENU)
FIXED = StaticOptions(tuple((name, 2) for name, _ in MENU), "fcfs", drops=False)


def test_static_degrees_are_those_of_the_menu_and_never_change() -> None:
    some = [request(0, MIDDLE), request(1, SMALL), request(2, SMALL)]
    assert plan_static(view(*some), STATIC).degrees == (2, 1, 1)
    held = request(0, MIDDLE, degree=4, ready_s=2.0)
    assert plan_static(view(held, request(1)), STATIC).degrees == (4, 0)


def test_a_fixed_degree_that_a_class_lacks_is_the_largest_below_it() -> None:
    odd = StaticOptions((("small", 3),))
    assert plan_static(view(request()), odd).degrees == (2,)
    assert plan_static(view(request(menu=LARGE)), odd).degrees == (4,)


def test_only_backfill_passes_over_one_that_has_to_wait() -> None:
    running = request(0, SMALL, degree=2, ready_s=1.0)
    waiting = [request(1, LARGE, deadline_s=20.0), request(2, SMALL, deadline_s=30.0)]
    for discipline, degrees in (
        ("fcfs", (2, 0, 0)),
        ("edf", (2, 0, 0)),
        ("edf_backfill", (2, 0, 1)),
    ):
        options = StaticOptions(MENU, discipline)  # type: ignore[arg-type]
        assert plan_static(view(running, *waiting), options).degrees == degrees


def test_order_is_by_arrival_or_by_deadline() -> None:
    first = request(0, LARGE, arrival_s=0.0, deadline_s=90.0)
    urgent = request(1, LARGE, arrival_s=1.0, deadline_s=50.0)
    group = view(first, urgent, now_s=1.0)
    assert plan_static(group, StaticOptions(MENU, "fcfs")).degrees == (4, 0)
    assert plan_static(group, StaticOptions(MENU, "edf")).degrees == (0, 4)


def test_only_policies_that_drop_give_late_requests_up() -> None:
    late = request(0, MIDDLE, deadline_s=8.0)
    assert plan_static(view(late), STATIC).dropped == (0,)
    assert plan_static(view(late), FIXED).degrees == (2,)
    assert plan_moldable(view(late)).degrees == (4,)
    assert plan_moldable(view(late, now_s=5.0)).dropped == (0,)


def test_moldable_starts_at_the_least_degree_in_time_and_lets_nobody_pass() -> None:
    some = [request(i, MIDDLE, deadline_s=9.0 + i) for i in range(3)]
    assert plan_moldable(view(*some)).degrees == (2, 2, 0)
    blocked = [request(0, LARGE, degree=2, ready_s=2.0), request(1, MIDDLE, deadline_s=6.0)]
    assert plan_moldable(view(*blocked, request(2, SMALL))).degrees == (2, 0, 0)


def test_widest_serves_one_after_the_other_and_preempts() -> None:
    large = request(0, LARGE, steps_left=3, deadline_s=30.0, degree=4, ready_s=3.0)
    small = request(1, SMALL, deadline_s=6.0)
    assert plan_widest(view(large, small)).degrees == (0, 4)
    assert plan_widest(view(large, small)).sacrificed == ()
    hurried = request(0, LARGE, steps_left=4, deadline_s=13.0)
    assert plan_widest(view(hurried, small)).sacrificed == (0,)


grid = st.lists(
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=0, max_size=2),
    min_size=1,
    max_size=4,
)


@given(grid, st.integers(1, 6), st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_knapsack_saves_as_many_as_enumeration(
    drawn: list[list[tuple[int, bool]]], num_gpus: int, rests: list[bool]
) -> None:
    offered = [
        (
            Option(-1, 0, rest),
            *(Option(level, width, one) for level, (width, one) in enumerate(some)),
        )
        for some, rest in zip(drawn, rests, strict=False)
    ]
    best = max(
        sum(one.survives for one in chosen)
        for chosen in product(*offered)
        if sum(one.width for one in chosen) <= num_gpus
    )
    levels = choose_options(offered, num_gpus)
    chosen = [
        next(one for one in some if one.level == level)
        for some, level in zip(offered, levels, strict=True)
    ]
    assert sum(one.width for one in chosen) <= num_gpus
    assert sum(one.survives for one in chosen) == best


@given(requests_strategy(1))
def test_the_cheapest_mix_is_that_of_all_splits_over_two_degrees(some: list[GroupRequest]) -> None:
    (one,) = some
    mix = cheapest_mix(one, 0.0)
    assert sum(part.steps for part in mix) == one.steps_left
    assert all(part.steps > 0 for part in mix)

    def cost(split: list[tuple[int, int]]) -> tuple[float, float]:
        seconds = sum(steps * one.menu.step_s[level] for level, steps in split)
        gpu_s = sum(steps * one.menu.step_s[lv] * one.menu.degrees[lv] for lv, steps in split)
        return seconds, gpu_s

    splits = [
        cost([(low, first), (high, one.steps_left - first)])
        for low in range(3)
        for high in range(3)
        for first in range(one.steps_left + 1)
    ]
    least = min(gpu_s for seconds, gpu_s in splits if seconds <= one.due_s + 1e-9)
    seconds, gpu_s = cost(list(mix))
    assert seconds <= one.due_s + 1e-8
    assert gpu_s == pytest.approx(least)


def test_published_rounds_give_nothing_to_one_that_survives_without() -> None:
    # the tie between running and waiting goes to no GPUs; elastic scale-up then gives them anyway
    relaxed = request(0, LARGE, steps_left=2, deadline_s=90.0)
    mix = cheapest_mix(relaxed, 0.0)
    assert choose_options([options_of(relaxed, mix, 0.0, 13.0)], 4) == [-1]
    assert plan_knapsack(view(relaxed), KnapsackOptions(13.0)).degrees == (4,)


def test_published_rounds_begin_on_the_grid_and_keep_their_degrees_between() -> None:
    options = KnapsackOptions(2.0)
    waiting = request(0, SMALL)
    assert plan_knapsack(view(waiting, now_s=3.0), options).degrees == (0,)
    assert plan_knapsack(view(waiting, now_s=3.0), options).look_again_s == 4.0
    assert plan_knapsack(view(waiting, now_s=4.0), options).degrees == (4,)
    running = request(0, SMALL, degree=2, target=1, ready_s=3.5)
    assert plan_knapsack(view(running, now_s=3.0), options).degrees == (1,)


def test_other_clockings_begin_rounds_when_idle_or_whenever_something_happens() -> None:
    waiting, running = request(0), request(1, MIDDLE, degree=1, target=1, ready_s=9.0)
    for clocking, degrees in (("grid", (0, 1)), ("idle", (0, 1)), ("events", (2, 2))):
        options = KnapsackOptions(2.0, clocking)  # type: ignore[arg-type]
        group = view(waiting, running, now_s=3.0)
        group = type(group)(4, 3.0, group.requests, 0.0, look_again_s=3.5)
        decision = plan_knapsack(group, options)
        if clocking == "events":
            assert sum(decision.degrees) == 4
            assert decision.look_again_s == 5.0
        else:
            assert decision.degrees == degrees
    idle = plan_knapsack(view(waiting, now_s=3.0), KnapsackOptions(2.0, "idle"))
    assert (idle.degrees, idle.look_again_s) == ((4,), 5.0)


PLANNERS: dict[str, Planner] = {
    "static": partial(plan_static, options=STATIC),
    "fixed": partial(plan_static, options=FIXED),
    "moldable": plan_moldable,
    "widest": plan_widest,
    "knapsack": partial(plan_knapsack, options=KnapsackOptions(0.5, "events")),
}


@pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)
@given(some=requests_strategy(8))
def test_every_baseline_stays_within_the_gpus(planner: Planner, some: list[GroupRequest]) -> None:
    decision = planner(view(*some))
    assert sum(decision.degrees) <= 4
    for one, degree in zip(some, decision.degrees, strict=True):
        assert degree == 0 or degree in one.menu.degrees
        assert degree == 0 or one.request_id not in decision.dropped
