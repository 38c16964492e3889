"""Requests as fluids end when arithmetic says they do."""

from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.sequence_parallel.fluid import FluidPlan, Manner, Work, simulate
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, GroupRequest
from tests.policies.groups import LARGE, MIDDLE, SMALL, requests_strategy, works_by_deadline


def plan(
    works: list[Work], manner: Manner = "narrow", num_gpus: int = 4, switch_s: float = 0.0
) -> FluidPlan:
    return simulate(works, num_gpus, 0.0, switch_s=switch_s, manner=manner)


def test_a_sole_request_is_served_at_its_best_degree_in_either_manner() -> None:
    for manner in get_args(Manner):
        one = plan([Work(0, LARGE, 4.0, 4 * 3.1)], manner)
        assert one.levels == (2,)
        assert one.first_late is None
    assert plan([Work(0, LARGE, 4.0, 4 * 3.1 - 0.01)]).first_late == 0


def test_narrow_takes_the_least_degree_in_time_and_widens_by_what_is_left() -> None:
    # the first needs two GPUs, so that one is left beside the second; nobody can use just one more
    works = [Work(0, MIDDLE, 2.0, 4.4), Work(1, SMALL, 1.0, 9.0)]
    assert plan(works).levels == (1, 1)
    assert plan(works, "wide").levels == (2, -1)
    # a request in a hurry takes all, and the other waits until it is done
    hurried = [Work(0, MIDDLE, 2.0, 2.8), Work(1, SMALL, 1.0, 3.5)]
    assert plan(hurried).levels == (2, -1)
    assert plan(hurried).first_late is None
    assert plan([hurried[0], hurried[1]._replace(due_s=3.49)]).first_late == 1


def test_a_change_of_level_costs_the_time_of_a_switch() -> None:
    due_s = 4 * 3.1
    assert plan([Work(0, LARGE, 4.0, due_s, level=2)], switch_s=0.5).first_late is None
    assert plan([Work(0, LARGE, 4.0, due_s, level=1)], switch_s=0.5).first_late == 0
    assert plan([Work(0, LARGE, 4.0, due_s + 0.5, level=1)], switch_s=0.5).first_late is None
    assert plan([Work(0, LARGE, 4.0, due_s)], switch_s=0.5).first_late is None


def test_the_first_late_request_is_that_of_the_order_not_of_time() -> None:
    works = [Work(0, LARGE, 4.0, 10.0), Work(1, SMALL, 1.0, 5.0)]
    assert plan(works, "wide").first_late == 0


def test_without_a_gpu_the_first_is_late() -> None:
    assert plan([Work(0, SMALL, 1.0, 5.0)], num_gpus=0).first_late == 0
    assert plan([]).first_late is None


@given(requests_strategy(5), st.sampled_from(["narrow", "wide"]))
def test_levels_fit_the_gpus_and_leave_none_that_a_waiting_request_could_use(
    some: list[GroupRequest], manner: Manner
) -> None:
    works = works_by_deadline(some)
    levels = plan(works, manner).levels
    used = sum(w.menu.degrees[level] for w, level in zip(works, levels, strict=True) if level >= 0)
    assert used <= 4
    assert used == 4 or -1 not in levels


@given(requests_strategy(5))
def test_served_wide_nobody_is_late_for_one_that_comes_after_it(some: list[GroupRequest]) -> None:
    works = works_by_deadline(some)
    late = plan(works, "wide").first_late
    assert plan(works[:late], "wide").first_late is None
    if late is not None:
        assert plan(works[: late + 1], "wide").first_late == late


@given(requests_strategy(4))
def test_following_the_plan_in_small_time_slices_agrees_with_it(some: list[GroupRequest]) -> None:
    works = works_by_deadline(some)
    late = plan(works, "wide").first_late
    assert (late is None) == _on_time_in_slices(works)


def _on_time_in_slices(works: list[Work]) -> bool:
    """Serve wide with exact ends found one by one, written out independently."""
    left = {w.row: w.steps for w in works}
    time_s = 0.0
    while any(left.values()):
        free, rates = 4, {}
        for w in works:
            fitting = [
                (d, s)
                for d, s in zip(w.menu.degrees, w.menu.step_s, strict=True)
                if d <= free and left[w.row]
            ]
            if fitting:
                degree, step_s = fitting[-1]
                rates[w.row] = step_s
                free -= degree
        first = min(rates, key=lambda place: left[place] * rates[place])
        span_s = left[first] * rates[first]
        time_s += span_s
        for place, step_s in rates.items():
            left[place] = max(0.0, left[place] - span_s / step_s)
            if left[place] * step_s < 1e-9:
                left[place] = 0.0
                if time_s > next(w.due_s for w in works if w.row == place) + 1e-9:
                    return False
    return True


@given(requests_strategy(5))
def test_one_after_the_other_is_what_the_wide_manner_comes_to(some: list[GroupRequest]) -> None:
    # with a fifth GPU that nobody can use the general way is gone
    works = works_by_deadline(some)
    spare = [work._replace(menu=_without_one_gpu(work.menu)) for work in works]
    assert plan(spare, "wide", 5).first_late == plan(spare, "wide", 4).first_late
    assert plan(spare, "wide", 5).levels[:1] == plan(spare, "wide", 4).levels[:1]


def _without_one_gpu(menu: DegreeMenu) -> DegreeMenu:
    return DegreeMenu(menu.slo_class, menu.degrees[1:], menu.step_s[1:])
