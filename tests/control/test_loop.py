"""The plan loop applies differences, remembers what worked, and survives whatever fails."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from ray_cluster.control.loop import ControlLoop, RoundReport
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.policies.cluster_state import ClusterState
from ray_cluster.policies.plan import CascadePlan, Plan, PlanDiff, PlannedSettings, PoolPlan, diff
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
    return ControlLoop(ListedPlans([*plans]), cluster, events, period_s=5.0), cluster, events


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
    loop = ControlLoop(ListedPlans([SMALL]), cluster, events, period_s=5.0, on_round=rounds.append)
    loop.start()
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
    loop = ControlLoop(Broken([]), cluster, events, period_s=5.0)
    with pytest.raises(ArithmeticError):
        loop.start()
    events.run(until_s=5.0)
    assert loop.applied.pools == SMALL.pools
    loop.stop()


def test_a_plan_that_was_applied_before_is_not_applied_again() -> None:
    cluster, events = RecordingCluster(), EventQueue()
    loop = ControlLoop(ListedPlans([SMALL]), cluster, events, period_s=5.0, applied=SMALL)
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
