"""The plan loop gives up replicas that do not come in time, and tries them again later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.control.loop import ControlLoop, LoopLimits, RoundReport
from ray_cluster.control.records import Counts, Times, reason_of, record_of
from ray_cluster.policies.planning.plan import Plan, PoolPlan
from ray_cluster.protocol.controller import HeldPool
from ray_cluster.simulator.control.scaling import Faults
from ray_cluster.simulator.events import EventQueue
from tests.control.test_loop import SMALL, ListedPlans, ShownCluster, shown
from tests.simulator.clusters import simulated

LIMITS = LoopLimits(apply_timeout_s=10.0)
# of SMALL, both pools grow; only a's replicas come
GROWN = replace(SMALL, pools=(PoolPlan("a", 3, 4), PoolPlan("b", 3, 8)))


def growing(limits: LoopLimits = LIMITS) -> tuple[ControlLoop[int], ShownCluster, EventQueue]:
    return shown(GROWN, limits=lambda: limits, ready={"a": 3, "b": 1})


def rounds(loop: ControlLoop[int], events: EventQueue, count: int) -> list[RoundReport]:
    """Rounds 5 s apart, the first now."""
    found = []
    for _ in range(count):
        found.append(loop.run_round())
        events.run(events.now_s + 5.0)
    return found


def test_a_growth_that_is_late_is_rolled_back_once_held_and_tried_again() -> None:
    loop, cluster, events = growing()
    found = rounds(loop, events, 7)
    # back at 15 s, again at 25 s; the other pool stays as planned
    assert cluster.actions() == ["scale-a 3", "scale-b 3", "scale-b 1", "scale-b 3"]
    assert [len(one.overdue) for one in found] == [0, 0, 0, 1, 0, 0, 0]
    assert [[hold.until_s for hold in one.holds] for one in found[3:6]] == [[25.0], [25.0], []]
    assert found[3].plan.num_replicas("b") == 1
    assert found[3].plan.version > found[2].plan.version


def test_the_next_hold_is_longer_and_a_success_ends_it() -> None:
    loop, cluster, events = growing()
    found = rounds(loop, events, 9)
    (hold,) = found[8].holds
    assert (hold.num_failures, hold.until_s) == (2, 40.0 + 20.0)
    cluster.actions()
    rounds(loop, events, 4)
    cluster.ready["b"] = 3
    rounds(loop, events, 4)
    assert cluster.actions() == ["scale-b 3"]


def test_a_rollback_that_cannot_be_applied_is_tried_again_and_reported_once() -> None:
    loop, cluster, events = growing()
    rounds(loop, events, 3)
    cluster.failing["scale-b"] = 1
    found = rounds(loop, events, 2)
    assert [len(one.failures) for one in found] == [1, 0]
    assert [len(one.overdue) for one in found] == [1, 0]
    assert cluster.actions()[-1] == "scale-b 1"


def test_a_loop_that_may_not_act_rolls_nothing_back() -> None:
    limits = LIMITS
    loop, cluster, events = shown(GROWN, limits=lambda: limits, ready={"a": 3, "b": 1})
    rounds(loop, events, 1)
    cluster.actions()
    limits = replace(LIMITS, acts=False)
    found = rounds(loop, events, 6)
    limits = LIMITS
    # time begins anew
    found += rounds(loop, events, 2)
    assert cluster.actions() == []
    assert not any(one.overdue or one.holds for one in found)
    assert rounds(loop, events, 1)[0].overdue


def test_a_cluster_that_cannot_be_seen_stays_held() -> None:
    loop, cluster, events = growing()
    rounds(loop, events, 4)
    cluster.failing["observe"] = 1
    assert [one.pool for one in rounds(loop, events, 1)[0].holds] == ["b"]


def test_operators_are_shown_what_was_rolled_back_and_until_when_it_is_held() -> None:
    loop, _, events = growing()
    found = rounds(loop, events, 5)
    late, held = (record_of(one, None, None, Times(1e9, 0.1, 10.0)) for one in found[3:])
    assert late.overdue == ("1 of 3 replicas of b are ready after 15 s",)
    assert late.rollbacks == ("b: back from 3 to 1 replicas, and no more for 10 s",)
    assert late.held == (HeldPool("b", 1, 1e9 + 10.0),)
    assert (held.overdue, held.rollbacks) == ((), ())
    assert held.held == (HeldPool("b", 1, 1e9 + 5.0),)


def test_a_held_number_of_replicas_has_a_reason() -> None:
    said = reason_of(Counts(2, 4, 1, 8, 0, held=2), is_short=False)
    assert said == "apply_timeout_s: of 4, no more were ready in time"


def test_the_log_says_what_is_rolled_back(caplog: pytest.LogCaptureFixture) -> None:
    loop, _, events = growing()
    rounds(loop, events, 4)
    assert "rolled back: b: back from 3 to 1 replicas, and no more for 10 s" in caplog.text


def test_a_simulated_cluster_without_enough_gpus_keeps_what_works() -> None:
    cluster, events = simulated(num_gpus=3)
    wanted = Plan((PoolPlan("light", 2, 4), PoolPlan("heavy", 3, 2)))
    found: list[RoundReport] = []
    loop = ControlLoop(
        ListedPlans([wanted]),
        cluster,
        events,
        on_round=found.append,
        limits=lambda: LoopLimits(apply_timeout_s=60.0),
    )
    loop.start(events, 5.0)
    events.run(100.0)
    state = cluster.observe()
    assert (state.pool("light").num_ready, state.pool("heavy").num_ready) == (2, 1)
    assert loop.applied.num_replicas("heavy") == 1
    assert [one.pool for report in found for one in report.overdue] == ["heavy"]
    loop.stop()


def test_failing_gpus_lead_to_longer_holds_and_never_below_the_count_before() -> None:
    # a replica loads for 20 s, and a GPU fails every 10 s
    cluster, events = simulated(num_gpus=4, faults=Faults(10.0, 5.0))
    small = Plan((PoolPlan("light", 0, 4), PoolPlan("heavy", 1, 2)))
    wanted = Plan((PoolPlan("light", 0, 4), PoolPlan("heavy", 4, 2)))
    found: list[RoundReport] = []
    loop = ControlLoop(
        ListedPlans([small, wanted]),
        cluster,
        events,
        applied=small,
        on_round=found.append,
        limits=lambda: LoopLimits(apply_timeout_s=40.0),
    )
    cluster.scale("heavy", 1)
    loop.start(events, 5.0)
    events.run(2_000.0)
    loop.stop()
    holds = [one.hold for report in found for one in report.overdue if one.hold is not None]
    assert len(holds) > 2
    assert max(one.num_failures for one in holds) > 2
    assert min(report.plan.num_replicas("heavy") for report in found) >= 1
