"""Menus hold the degrees that pay, and know the cheapest mixes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.sequence_parallel.types import DegreeMenu, is_hopeless, menu_of
from tests.policies.groups import LARGE, SMALL, request


def test_degrees_that_are_too_many_or_not_faster_are_left_out() -> None:
    menu = menu_of("a", {1: 1.0, 2: 1.1, 4: 0.5, 8: 0.4}, num_gpus=4)
    assert menu.degrees == (1, 4)
    assert menu.step_s == (1.0, 0.5)


def test_the_largest_degree_that_fits_is_found_for_every_number_of_free_gpus() -> None:
    menu = menu_of("a", {1: 1.0, 2: 0.8, 4: 0.5}, num_gpus=8)
    assert [menu.top(free) for free in range(8)] == [-1, 0, 1, 1, 2, 2, 2, 2]
    assert [menu.level_of(degree) for degree in (1, 2, 4, 8)] == [0, 1, 2, -1]


@pytest.mark.parametrize(
    ("degrees", "step_s"), [((), ()), ((2, 1), (2.0, 1.0)), ((1, 2), (1.0, 1.0)), ((1,), (0.0,))]
)
def test_a_menu_that_does_not_rise_and_fall_is_refused(
    degrees: tuple[int, ...], step_s: tuple[float, ...]
) -> None:
    with pytest.raises(ValueError, match="menu"):
        DegreeMenu("a", degrees, step_s)


# as profiles say them: of times that differ in their last bits nobody can tell the slower
MILLISECONDS = st.integers(100, 10_000).map(lambda number: number / 1000)


@given(st.lists(MILLISECONDS, min_size=4, max_size=4, unique=True), st.floats(0.0, 1.0))
def test_no_mix_of_two_degrees_is_cheaper_than_the_frontier(
    times: list[float], share: float
) -> None:
    menu = menu_of("a", dict(zip((1, 2, 4, 8), times, strict=True)), num_gpus=8)
    points = [(s, s * d) for s, d in zip(menu.step_s, menu.degrees, strict=True)]
    for slow_s, one in points:
        for fast_s, other in points:
            mean_s, gpu_s = share * slow_s + (1 - share) * fast_s, share * one + (1 - share) * other
            assert _frontier_gpu_s(menu, mean_s) <= gpu_s + 1e-9


def _frontier_gpu_s(menu: DegreeMenu, mean_s: float) -> float:
    if mean_s >= menu.frontier[0][0]:
        return menu.frontier[0][1]
    for (slow_s, narrow), (fast_s, wide) in zip(menu.frontier, menu.frontier[1:], strict=False):
        if fast_s <= mean_s:
            return wide + (mean_s - fast_s) * (narrow - wide) / (slow_s - fast_s)
    return menu.frontier[-1][1]


def test_a_request_is_hopeless_once_no_degree_is_fast_enough() -> None:
    one = request(menu=LARGE, steps_left=2, deadline_s=6.2)
    assert not is_hopeless(one, 0.0)
    assert is_hopeless(one, 0.1)
    assert not is_hopeless(one, 0.1, doubt=0.05)
    assert is_hopeless(one, 0.6, doubt=0.05)


def test_the_step_in_flight_and_the_tail_count() -> None:
    menu = DegreeMenu("a", SMALL.degrees, SMALL.step_s, tail_s=2.0)
    running = request(menu=menu, steps_left=2, deadline_s=6.0, degree=1, ready_s=1.0)
    assert running.due_s == 4.0
    assert running.finish_s(0, now_s=0.5) == pytest.approx(3.0)
    assert running.finish_s(2, now_s=1.5) == pytest.approx(2.9)
