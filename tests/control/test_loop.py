"""The plan loop applies differences, remembers what worked, and survives whatever fails."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ray_cluster.control.loop import ControlLoop, LoopLimits, RoundReport
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.policies.planning.cluster_state import ClusterState, PoolState
from ray_cluster.policies.planning.plan import (
    CascadePlan,
    Plan,
    PlanDiff,
    PlannedSettings,
    PoolPlan,
    diff,
)
from ray_cluster.simulator.events import EventQueue

EMPTY = ClusterState(0.0, (), (), (), ())
SMALL = Plan((PoolPlan("a", 2, 4), PoolPlan("b", 1, 8)), (CascadePlan("s", 0.3),))
LARGE = Plan((PoolPlan("a", 1, 4), PoolPlan("b", 3, 8)), (CascadePlan("s", 0.3),))


@dataclass
class ListedPlans:
    """Plans in a row, the last one for ever; its memory is how many were asked for."""

    plans: list[Plan]

    def begin(self, state: ClusterState) -> int:
        return 0

    def plan(self, state: ClusterState, memory: int) -> tuple[Plan, int]:
        return self.plans[min(memory, len(self.plans) - 1)], memory + 1


class RecordingCluster:
    """Writes down what it is asked for, and fails as often as it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.failing: dict[str, int] = {}

    def _ask(self, what: str) -> None:
        name = what.split(maxsplit=1)[0]
        if self.failing.get(name, 0) > 0:
            self.failing[name] -= 1
            raise DispatcherUnavailable(f"{name} is away")
        self.asked.append(what)

    def observe(self) -> ClusterState:
        self._ask("observe")
        return EMPTY

    def scale(self, pool: str, num_replicas: int) -> None:
        self._ask(f"scale-{pool} {num_replicas}")

    def apply(self, settings: PlannedSettings) -> None:
        self._ask(f"apply {settings.version}")

    def actions(self) -> list[str]:
        found = [one for one in self.asked if one != "observe"]
        self.asked.clear()
        return found


def loop_of(*plans: Plan) -> tuple[ControlLoop[int], RecordingCluster, EventQueue]:
    cluster, events = RecordingCluster(), EventQueue()
    return ControlLoop(ListedPlans([*plans]), cluster, events), cluster, events


def test_only_differences_are_applied_and_shrinking_comes_first() -> None:
    loop, cluster, _ = loop_of(SMALL, SMALL, LARGE)
    loop.run_round()
    assert cluster.actions() == ["apply 1", "scale-a 2", "scale-b 1"]
    loop.run_round()
    assert cluster.actions() == []
    loop.run_round()
    assert cluster.actions() == ["scale-a 1", "scale-b 3"]


def test_versions_rise_with_plans_that_differ_and_only_with_those() -> None:
    loop, _, _ = loop_of(SMALL, SMALL, LARGE, SMALL)
    versions = [loop.run_round().plan.version for _ in range(5)]
    assert versions == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("failing", ["apply", "scale-a", "scale-b"])
def test_what_could_not_be_applied_is_tried_again_and_nothing_else(failing: str) -> None:
    loop, cluster, _ = loop_of(SMALL)
    cluster.failing[failing] = 2
    reports = [loop.run_round() for _ in range(4)]
    assert [len(one.failures) for one in reports] == [1, 1, 0, 0]
    assert "is away" in reports[0].failures[0]
    asked = cluster.actions()
    assert len(asked) == len(set(asked)) == 3
    assert asked[-1].startswith(failing)
    assert diff(loop.applied, SMALL) == PlanDiff(None, (), ())


def test_a_cluster_that_cannot_be_seen_is_left_alone() -> None:
    loop, cluster, _ = loop_of(SMALL)
    cluster.failing["observe"] = 1
    report = loop.run_round()
    assert report.actions is None
    assert report.failures == ("cannot observe: observe is away",)
    assert loop.run_round().actions is not None


def test_rounds_go_on_every_period_until_stopped() -> None:
    rounds: list[RoundReport] = []
    cluster, events = RecordingCluster(), EventQueue()
    cluster.failing["observe"] = 1
    loop = ControlLoop(ListedPlans([SMALL]), cluster, events, on_round=rounds.append)
    loop.start(events, 5.0)
    events.run(until_s=12.0)
    assert [one.at_s for one in rounds] == [0.0, 5.0, 10.0]
    loop.stop()
    events.run()
    assert len(rounds) == 3


def test_a_planner_with_a_bug_is_seen_and_does_not_end_the_loop() -> None:
    class Broken(ListedPlans):
        def plan(self, state: ClusterState, memory: int) -> tuple[Plan, int]:
            if memory == 0:
                self.plans = [SMALL]
                raise ArithmeticError("bug")
            return super().plan(state, memory)

        def begin(self, state: ClusterState) -> int:
            return 0 if not self.plans else 1

    cluster, events = RecordingCluster(), EventQueue()
    loop = ControlLoop(Broken([]), cluster, events)
    with pytest.raises(ArithmeticError):
        loop.start(events, 5.0)
    events.run(until_s=5.0)
    assert loop.applied.pools == SMALL.pools
    loop.stop()


def test_a_plan_that_was_applied_before_is_not_applied_again() -> None:
    cluster, events = RecordingCluster(), EventQueue()
    loop = ControlLoop(ListedPlans([SMALL]), cluster, events, applied=SMALL)
    loop.run_round()
    assert cluster.actions() == []
    assert loop.state == EMPTY


def test_a_pool_that_a_plan_no_longer_names_is_emptied() -> None:
    found = diff(SMALL, replace(SMALL, pools=SMALL.pools[:1]))
    assert [(one.pool, one.num_after) for one in found.stops] == [("b", 0)]
    assert found.starts == ()


def test_equal_plans_differ_in_nothing() -> None:
    same = replace(SMALL, version=9, infeasible="for some reason")
    assert diff(SMALL, same) == PlanDiff(None, (), ())
    only_settings = replace(SMALL, cascades=(CascadePlan("s", 0.4),))
    assert diff(SMALL, only_settings).scales == ()
    assert diff(SMALL, only_settings).settings is not None


class ShownCluster(RecordingCluster):
    """Says what is in force: what it was asked for, and what others have changed."""

    def __init__(self, ready: dict[str, int] | None = None) -> None:
        super().__init__()
        self.in_force = Plan()
        self.ready = ready or {}

    def observe(self) -> ClusterState:
        pools = tuple(PoolState(name, number) for name, number in self.ready.items())
        return replace(super().observe(), in_force=self.in_force, pools=pools)

    def scale(self, pool: str, num_replicas: int) -> None:
        super().scale(pool, num_replicas)
        others = tuple(one for one in self.in_force.pools if one.pool != pool)
        cap = next((one.max_batch for one in self.in_force.pools if one.pool == pool), 0)
        self.in_force = replace(self.in_force, pools=(*others, PoolPlan(pool, num_replicas, cap)))

    def apply(self, settings: PlannedSettings) -> None:
        super().apply(settings)
        caps = dict(settings.max_batches)
        pools = tuple(replace(one, max_batch=caps[one.pool]) for one in self.in_force.pools)
        self.in_force = Plan(pools, settings.cascades, settings.version)


def shown(*plans: Plan, **given: Any) -> tuple[ControlLoop[int], ShownCluster, EventQueue]:
    cluster, events = ShownCluster(given.pop("ready", None)), EventQueue()
    cluster.in_force = SMALL
    loop = ControlLoop(ListedPlans([*plans]), cluster, events, **given)
    return loop, cluster, events


def test_a_count_that_somebody_has_changed_is_healed_in_the_next_round() -> None:
    loop, cluster, _ = shown(SMALL)
    loop.run_round()
    assert cluster.actions() == []
    cluster.in_force = replace(SMALL, pools=(PoolPlan("a", 5, 4), PoolPlan("b", 1, 8)))
    loop.run_round()
    assert cluster.actions() == ["scale-a 2"]
    loop.run_round()
    assert cluster.actions() == []


def test_a_dispatcher_that_has_lost_its_plan_gets_it_again_under_a_later_version() -> None:
    loop, cluster, _ = shown(SMALL)
    cluster.in_force = replace(SMALL, cascades=(), version=7)
    assert loop.run_round().plan.version == 8
    assert cluster.actions() == ["apply 8"]


def test_a_threshold_that_hardly_moves_is_no_new_plan() -> None:
    near = replace(SMALL, cascades=(CascadePlan("s", 0.31, deferral_rate=0.2),))
    far = replace(SMALL, cascades=(CascadePlan("s", 0.33, deferral_rate=0.2),))
    loop, cluster, _ = shown(near, far)
    loop.run_round()
    assert cluster.actions() == []
    loop.run_round()
    assert cluster.actions() == ["apply 2"]


def test_so_it_is_with_the_threshold_for_idle_models() -> None:
    plans = (
        replace(SMALL, cascades=(CascadePlan("s", 0.3, idle_threshold=idle),))
        for idle in (None, 0.7, 0.71, 0.73, math.inf, math.inf)
    )
    loop, cluster, _ = shown(*plans)
    applied = []
    for _ in range(6):
        loop.run_round()
        applied.append(len(cluster.actions()))
    assert applied[1:] == [1, 0, 1, 1, 0]


def test_a_loop_that_may_not_act_says_what_it_would_do() -> None:
    loop, cluster, _ = shown(LARGE, limits=lambda: LoopLimits(acts=False))
    report = loop.run_round()
    assert cluster.actions() == []
    assert report.actions is not None
    assert [one.pool for one in report.actions.scales] == ["a", "b"]
    assert not report.is_applied


def test_a_round_scales_no_more_pools_than_it_may() -> None:
    loop, cluster, _ = shown(LARGE, limits=lambda: LoopLimits(most_scales=1))
    rounds = []
    for _ in range(3):
        loop.run_round()
        rounds.append(cluster.actions())
    assert rounds == [["scale-a 1"], ["scale-b 3"], []]


def test_missing_replicas_are_reported_until_they_come() -> None:
    limits = LoopLimits(apply_timeout_s=10.0)
    loop, cluster, events = shown(SMALL, limits=lambda: limits, ready={"a": 1, "b": 1})
    found = []
    for number in range(1, 7):
        found.append([one.words for one in loop.run_round().overdue])
        if number == 5:
            cluster.ready["a"] = 2
        events.run(until_s=5.0 * number)
    assert found[:3] == [[], [], []]
    assert found[3] == ["1 of 2 replicas of a are ready after 15 s"]
    assert found[4] == ["1 of 2 replicas of a are ready after 20 s"]
    assert found[5] == []
    # nothing had grown, so there is nothing to roll back
    assert cluster.actions() == []


def test_a_loop_goes_on_from_a_saved_memory() -> None:
    loop, _, _ = shown(SMALL, LARGE, memory=1)
    assert loop.run_round().plan.pools == LARGE.pools
    assert loop.memory == 2
