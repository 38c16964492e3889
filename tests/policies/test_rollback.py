"""A growth that is not ready in time is rolled back, and what is held grows no more for a while."""

from __future__ import annotations

import pytest

from ray_cluster.policies.planning.cluster_state import ClusterState, PoolState
from ray_cluster.policies.planning.plan import Plan, PoolPlan
from ray_cluster.policies.planning.rollback import (
    Growths,
    Overdue,
    Patience,
    Targets,
    held_back,
    holds_of,
    judge,
    noted,
    restarted,
)

TIMEOUT_S = 100.0


def plan(num_replicas: int) -> Plan:
    return Plan((PoolPlan("a", num_replicas, 4),))


class Course:
    """Rounds of one pool, whose target is what the last round has asked for."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.growths: Growths = ()
        self.refuses = False

    def round(self, now_s: float, wanted: int, ready: int) -> Overdue | None:
        state = ClusterState(now_s, (), (PoolState("a", ready),), (), ())
        patience, before = Patience(now_s, TIMEOUT_S), plan(self.target)
        self.growths, overdue = judge(self.growths, plan(wanted), before, state, patience)
        held = held_back(plan(wanted), self.growths, now_s)
        if not self.refuses:
            self.target = held.num_replicas("a")
        targets = Targets(before, plan(self.target))
        self.growths = noted(self.growths, held, targets, state, now_s)
        return overdue[0] if overdue else None

    def hold_s(self, now_s: float) -> float:
        """Seconds for which the pool is held yet."""
        return sum(one.until_s - now_s for one in holds_of(self.growths, now_s))


@pytest.mark.parametrize(
    ("target", "ready_before", "ready", "back"),
    [
        pytest.param(1, 1, 3, 3, id="to what is ready"),
        pytest.param(2, 2, 1, 2, id="not below the target before"),
        pytest.param(1, 3, 2, 3, id="not below what was ready before"),
        pytest.param(0, 0, 0, 0, id="to nothing, if nothing was there"),
    ],
)
def test_a_late_growth_goes_back(target: int, ready_before: int, ready: int, back: int) -> None:
    course = Course(target)
    course.round(0.0, 5, ready_before)
    assert course.target == 5
    assert course.round(100.0, 5, ready) is None
    overdue = course.round(101.0, 5, ready)
    assert overdue is not None
    assert overdue.words == f"{ready} of 5 replicas of a are ready after 101 s"
    assert (
        overdue.rollback_words(101.0) == f"a: back from 5 to {back} replicas, and no more for 100 s"
    )
    assert course.target == back


def test_a_hold_bars_growth_and_nothing_else_until_it_is_over() -> None:
    course = Course(2)
    course.round(0.0, 5, 2)
    assert course.round(101.0, 5, 3) is not None
    # a smaller plan, and what there was before, may be had at any time
    for now_s, wanted, target in ((110.0, 1, 1), (120.0, 3, 3), (200.0, 5, 3), (201.0, 5, 5)):
        assert course.round(now_s, wanted, 3) is None
        assert course.target == target


def test_each_failure_in_a_row_doubles_the_hold_up_to_sixteen_timeouts() -> None:
    course, now_s, holds = Course(1), 0.0, []
    for _ in range(7):
        course.round(now_s, 3, 1)
        assert course.round(now_s + 101.0, 3, 1) is not None
        holds.append(course.hold_s(now_s + 101.0))
        now_s += 101.0 + holds[-1]
    assert holds == [100.0, 200.0, 400.0, 800.0, 1600.0, 1600.0, 1600.0]


def test_a_pool_that_would_have_none_left_is_tried_again_soon() -> None:
    course, now_s = Course(0), 0.0
    for _ in range(3):
        course.round(now_s, 2, 0)
        assert course.round(now_s + 101.0, 2, 0) is not None
        assert (course.target, course.hold_s(now_s + 101.0)) == (0, 100.0)
        now_s += 201.0


def test_a_growth_that_succeeds_ends_the_row_of_failures() -> None:
    course = Course(1)
    course.round(0.0, 3, 1)
    course.round(101.0, 3, 1)
    course.round(201.0, 3, 1)
    course.round(250.0, 3, 3)
    course.round(300.0, 5, 3)
    course.round(401.0, 5, 3)
    assert course.hold_s(401.0) == 100.0


def test_a_part_of_a_growth_that_was_rolled_back_is_no_success() -> None:
    course = Course(1)
    course.round(0.0, 5, 1)
    course.round(101.0, 5, 3)
    # the next round is only when the hold is over
    course.round(300.0, 5, 3)
    course.round(401.0, 5, 3)
    assert course.hold_s(401.0) == 200.0


def test_each_step_of_a_growth_has_its_own_time() -> None:
    course = Course(1)
    course.round(0.0, 2, 1)
    course.round(60.0, 4, 1)
    # the first step has come: the second is not late yet
    assert course.round(120.0, 4, 2) is None
    overdue = course.round(161.0, 4, 2)
    assert overdue is not None
    assert (overdue.num_replicas, course.target) == (4, 2)


def test_a_plan_that_wavers_does_not_put_off_the_rollback() -> None:
    course = Course(1)
    for now_s in range(0, 101, 10):
        assert course.round(float(now_s), 3 + now_s // 10 % 2, 1) is None
    assert course.round(101.0, 3, 1) is not None
    assert course.target == 1


def test_what_is_no_longer_planned_is_not_overdue() -> None:
    course = Course(1)
    course.round(0.0, 5, 1)
    assert course.round(101.0, 1, 1) is None
    assert course.hold_s(101.0) == 0.0


def test_a_replica_that_dies_is_reported_and_none_is_given_up() -> None:
    course = Course(3)
    for now_s in (0.0, 50.0, 101.0, 110.0):
        overdue = course.round(now_s, 3, 2)
    assert overdue is not None
    assert overdue.words == "2 of 3 replicas of a are ready after 110 s"
    assert overdue.rollback_words(110.0) is None
    assert course.target == 3


def test_a_growth_beside_a_dead_replica_has_its_whole_time() -> None:
    course = Course(3)
    course.round(0.0, 3, 2)
    course.round(60.0, 5, 2)
    dead = course.round(110.0, 5, 2)
    assert dead is not None
    assert (dead.num_replicas, dead.hold, course.target) == (3, None, 5)
    assert course.round(161.0, 5, 2) is not None
    assert course.target == 3


def test_time_runs_from_when_the_cluster_could_be_asked() -> None:
    course = Course(1)
    course.refuses = True
    course.round(0.0, 3, 1)
    overdue = course.round(150.0, 3, 1)
    # it is reported, and goes on being tried
    assert overdue is not None
    assert overdue.hold is None
    course.refuses = False
    course.round(160.0, 3, 1)
    assert course.round(260.0, 3, 1) is None
    assert course.round(261.0, 3, 1) is not None
    assert course.target == 1


def test_a_target_that_lags_behind_is_not_rolled_back_twice() -> None:
    course = Course(1)
    course.round(0.0, 3, 1)
    assert course.round(101.0, 3, 1) is not None
    course.target = 3
    assert course.round(106.0, 3, 1) is None
    assert course.target == 1
    assert course.hold_s(106.0) == 95.0


def test_time_does_not_run_while_a_loop_must_not_act() -> None:
    course = Course(1)
    course.round(0.0, 3, 1)
    course.growths = restarted(course.growths, 90.0)
    assert course.round(190.0, 3, 1) is None
    assert course.round(191.0, 3, 1) is not None


def test_other_pools_are_untouched() -> None:
    wanted = Plan((PoolPlan("a", 3, 4), PoolPlan("b", 3, 4)))
    before = Plan((PoolPlan("a", 1, 4), PoolPlan("b", 1, 4)))
    state = ClusterState(0.0, (), (PoolState("a", 1), PoolState("b", 3)), (), ())
    growths = noted((), wanted, Targets(before, wanted), state, 0.0)
    growths, overdue = judge(growths, wanted, wanted, state, Patience(101.0, TIMEOUT_S))
    assert [one.pool for one in overdue] == ["a"]
    assert held_back(wanted, growths, 101.0).pools == (before.pools[0], wanted.pools[1])
