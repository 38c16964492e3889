"""A round gives every request a degree that keeps its deadline, if that can be."""

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.sequence_parallel.rounds import RoundOptions, plan_round
from ray_cluster.policies.sequence_parallel.types import GroupRequest
from tests.policies.groups import LARGE, MIDDLE, SMALL, request, requests_strategy, view


def test_an_empty_group_decides_nothing() -> None:
    assert plan_round(view()).degrees == ()


def test_a_sole_request_gets_the_best_degree() -> None:
    for menu in (SMALL, MIDDLE, LARGE):
        assert plan_round(view(request(menu=menu))).degrees == (4,)
        assert plan_round(view(request(menu=menu, deadline_s=50.0), num_gpus=2)).degrees == (2,)


def test_a_running_request_gives_way_to_one_in_a_hurry_and_is_not_given_up() -> None:
    large = request(0, LARGE, steps_left=3, deadline_s=20.0, degree=4, ready_s=3.0)
    small = request(1, SMALL, steps_left=4, deadline_s=6.0)
    decision = plan_round(view(large, small, now_s=1.0))
    assert decision.degrees[1] > 0
    assert not decision.sacrificed
    assert not decision.dropped


def test_under_overload_the_costliest_is_sacrificed_and_the_guard_keeps_it() -> None:
    large = request(0, LARGE, steps_left=4, deadline_s=13.0)
    small = request(1, SMALL, steps_left=6, deadline_s=6.0)
    plain = plan_round(view(large, small))
    assert (plain.sacrificed, plain.degrees) == ((0,), (0, 4))
    guarded = plan_round(view(large, small), RoundOptions(guard="large"))
    assert (guarded.sacrificed, guarded.degrees) == ((1,), (4, 0))


def test_a_sacrificed_request_gets_what_nobody_else_can_use() -> None:
    tiny = request(1, SMALL, steps_left=1, deadline_s=0.7)
    large = request(0, LARGE, steps_left=4, deadline_s=12.5)
    decision = plan_round(view(large, tiny, num_gpus=6))
    assert decision.sacrificed == (0,)
    assert decision.degrees == (2, 4)


def test_hopeless_requests_are_dropped_and_get_nothing() -> None:
    late = request(7, LARGE, steps_left=4, deadline_s=11.0)
    decision = plan_round(view(late, request(8)))
    assert decision.dropped == (7,)
    assert decision.degrees == (0, 4)


def test_one_that_is_late_by_what_is_believed_gets_what_is_left_as_long_as_there_is_doubt() -> None:
    doubtful = request(7, LARGE, steps_left=4, deadline_s=12.0)
    alone = plan_round(view(doubtful))
    assert (alone.dropped, alone.sacrificed, alone.degrees) == ((), (7,), (4,))
    assert plan_round(view(doubtful, request(8))).degrees == (0, 4)
    assert plan_round(view(doubtful), RoundOptions(doubt=0.0)).dropped == (7,)
    # of two that are given up, the one that could still be on time comes first
    hopeful = request(9, LARGE, steps_left=4, deadline_s=12.5)
    urgent = request(8, SMALL, steps_left=1, deadline_s=0.7)
    both = plan_round(view(doubtful, hopeful, urgent, num_gpus=6))
    assert both.sacrificed == (9, 7)
    assert both.degrees == (0, 2, 4)


def test_late_ones_get_what_is_left_where_none_is_dropped() -> None:
    keeps = RoundOptions(drops=False)
    late = request(7, LARGE, steps_left=4, deadline_s=1.0)
    doubtful = request(6, MIDDLE, steps_left=4, deadline_s=5.4)
    urgent = request(8, SMALL, steps_left=1, deadline_s=0.7)
    beside = plan_round(view(late, urgent, doubtful, num_gpus=7), keeps)
    assert (beside.dropped, beside.sacrificed, beside.degrees) == ((), (6, 7), (1, 4, 2))
    assert plan_round(view(late, urgent), keeps).degrees == (0, 4)
    assert plan_round(view(late), keeps).degrees == (4,)


def test_a_step_in_flight_that_overstays_is_waited_for() -> None:
    over = request(0, steps_left=0, deadline_s=9.0, degree=2, ready_s=1.0)
    decision = plan_round(view(over, request(1), now_s=2.0))
    assert not decision.dropped
    assert decision.degrees[0] > 0


@given(requests_strategy(8), st.sampled_from(["most", "large"]), st.integers(1, 9), st.booleans())
def test_degrees_are_the_menus_fit_the_gpus_and_leave_no_usable_gpu_idle(
    some: list[GroupRequest], guard: str, num_gpus: int, drops: bool
) -> None:
    group = view(*some, num_gpus=num_gpus, now_s=1.0)
    decision = plan_round(group, RoundOptions(guard, drops=drops))  # type: ignore[arg-type]
    assert drops or not decision.dropped
    assert sum(decision.degrees) <= num_gpus
    idle = num_gpus - sum(decision.degrees)
    for one, degree in zip(some, decision.degrees, strict=True):
        assert degree == 0 or degree in one.menu.degrees
        if one.request_id in decision.dropped:
            assert degree == 0
        elif degree == 0:
            assert idle < one.menu.degrees[0]


@given(requests_strategy(6), st.permutations(range(6)))
def test_the_decision_does_not_depend_on_the_order_of_the_view(
    some: list[GroupRequest], order: list[int]
) -> None:
    # of equal deadlines the first is served first: leave such sets out
    if len({one.deadline_s for one in some}) < len(some):
        return
    shuffled = [some[place] for place in order if place < len(some)]
    first, second = plan_round(view(*some)), plan_round(view(*shuffled))
    by_id = dict(zip((one.request_id for one in shuffled), second.degrees, strict=True))
    assert [by_id[one.request_id] for one in some] == list(first.degrees)
    assert sorted(first.sacrificed) == sorted(second.sacrificed)
