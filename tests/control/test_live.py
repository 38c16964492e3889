"""A running cell behind the plan loop, with a dispatcher and a scaler that are made up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ray_cluster.control.cell_fleet import Curves
from ray_cluster.control.live import LiveCluster, LivePlanner
from ray_cluster.control.loop import ControlLoop, RoundReport
from ray_cluster.control.records import Counts, Times, reason_of, record_of, setting_words
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.policies.planning.cell_planner import CellMemory
from ray_cluster.policies.planning.plan import CascadePlan, Plan, PlannedSettings, PoolPlan
from ray_cluster.protocol.controller import Observation, ObservedCascade, RoundRecord, ServiceCount
from tests.control.test_fleet import LIMITS, pool, replica, seen
from tests.fakes import FakeClock

PERIOD_S = 5.0


class MadeUpCell:
    """A dispatcher and a scaler: one model, whose replicas come within a period."""

    def __init__(self) -> None:
        self.now_s = 1e9
        self.num_arrived = 0
        self.target = 1
        self.others = 0
        self.plan: PlannedSettings | None = None
        self.limits = LIMITS
        self.is_away = False
        self.is_deployed = True
        self.most_ready = 10

    def targets(self) -> Mapping[str, int]:
        return {"m": self.target, "somebody-elses": 3} if self.is_deployed else {}

    def scale(self, pool: str, num_replicas: int) -> None:
        assert pool == "m"
        self.target = num_replicas

    def supply(self) -> Mapping[str, int]:
        return {"cpu": 400}

    async def observe(self, cursors: Mapping[str, int]) -> Observation:
        if self.is_away:
            raise DispatcherUnavailable("away")
        # a replica makes an image per second, eight at most in the same time
        replicas = tuple(
            replica(f"r{n}", age_s=1e4) for n in range(min(self.target, self.most_ready))
        )
        return replace(
            seen(
                pool("m", replicas=replicas, max_batch=1, min_replicas=1, num_cpus=1.0),
                services=(ServiceCount("m", self.num_arrived),),
            ),
            now_s=self.now_s,
            plan=self.plan,
            limits=self.limits,
        )

    async def apply_plan(self, plan: PlannedSettings) -> None:
        self.plan = plan

    async def note_round(self, record: RoundRecord, memory: str | None) -> None:
        raise AssertionError("the controller does that")

    async def wake(self, seen: int, wait_s: float) -> int:
        raise AssertionError("the controller does that")

    async def memory(self) -> str:
        return ""


class Rounds:
    """Rounds of the loop of a made-up cell, a period apart."""

    def __init__(self, cell: MadeUpCell, memory: CellMemory | None = None) -> None:
        self.cell = cell
        self.clock = FakeClock()
        loop = asyncio.get_running_loop()
        self.cluster = LiveCluster(cell, loop, cell, lambda _: Curves())
        self.loop = ControlLoop(
            LivePlanner(lambda: self.cluster.glance),
            self.cluster,
            self.clock,
            limits=self.cluster.limits,
            memory=memory,
        )

    async def run(self, count: int, per_s: float = 0.0) -> RoundReport:
        for _ in range(count):
            self.cell.now_s += PERIOD_S
            self.clock.advance(PERIOD_S)
            self.cell.num_arrived += round(per_s * PERIOD_S)
            report = await asyncio.to_thread(self.loop.run_round)
        return report


async def test_demand_makes_replicas_come_and_silence_makes_them_go() -> None:
    cell = MadeUpCell()
    rounds = Rounds(cell)
    report = await rounds.run(8, per_s=2.0)
    assert report.plan.infeasible is None
    assert cell.target == 3
    assert dict(cell.plan.max_batches) == {"m": 1} if cell.plan else False
    await rounds.run(40)
    assert cell.target == 1


async def test_a_count_changed_by_hand_is_healed_in_the_next_round() -> None:
    cell = MadeUpCell()
    rounds = Rounds(cell)
    await rounds.run(8, per_s=2.0)
    cell.target = 1
    await rounds.run(1, per_s=2.0)
    assert cell.target == 3


async def test_a_dispatcher_without_a_plan_gets_it_again() -> None:
    cell = MadeUpCell()
    rounds = Rounds(cell)
    await rounds.run(2)
    assert cell.plan is not None
    version, cell.plan = cell.plan.version, None
    await rounds.run(1)
    assert cell.plan is not None
    assert cell.plan.version >= version


async def test_a_pool_without_an_application_is_not_planned() -> None:
    cell = MadeUpCell()
    rounds = Rounds(cell)
    cell.is_deployed = False
    report = await rounds.run(2, per_s=2.0)
    assert report.plan.pools == ()
    assert report.failures == ()
    cell.is_deployed = True
    await rounds.run(8, per_s=2.0)
    assert cell.target == 3


async def test_a_paused_loop_changes_nothing_and_says_what_it_would() -> None:
    cell = MadeUpCell()
    cell.limits = replace(LIMITS, is_paused=True)
    rounds = Rounds(cell)
    report = await rounds.run(8, per_s=2.0)
    assert (cell.target, cell.plan) == (1, None)
    record = record_of(report, rounds.cluster.glance, rounds.loop.memory, Times(0.0, 0.1, 15.0))
    assert record.mode == "paused"
    assert "m: 1 to 3 replicas" in record.actions
    (demand,) = record.demand
    assert demand.service == "m"
    assert demand.per_s is not None
    assert 1.5 < demand.per_s < 2.5
    (planned,) = record.pools
    assert (planned.num_before, planned.num_ready, planned.num_planned) == (1, 1, 3)
    assert planned.replica_per_s == pytest.approx(1.0)
    assert 1.5 < planned.load_per_s < 2.5
    # what a replica makes is what was planned with: smoothed, not of this moment
    memory = rounds.loop.memory
    assert memory is not None
    slow = replace(memory, paces=tuple(replace(one, image_s=2.0) for one in memory.paces))
    record = record_of(report, rounds.cluster.glance, slow, Times(0.0, 0.1, 15.0))
    assert record.pools[0].replica_per_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("counts", "is_short", "said"),
    [
        (Counts(2, 2, 1, 4, 0), False, "the load"),
        (Counts(0, 0, 0, 4, 0), False, "no load"),
        (Counts(4, 6, 1, 4, 0), True, "max_replicas: the load would take 6"),
        (Counts(3, 6, 1, 4, 0), True, "the load would take 6, and there are no more devices"),
        (
            Counts(1, 0, 1, 4, 0),
            False,
            "min_replicas, or a replica at work that is not stopped",
        ),
        (Counts(2, 0, 1, 4, 2), False, "dwell_s: it has changed lately"),
        (Counts(3, 2, 1, 4, 0), False, "headroom: bursts, deadlines, batches that are not full"),
    ],
)
def test_a_number_of_replicas_has_a_reason(counts: Counts, is_short: bool, said: str) -> None:
    assert reason_of(counts, is_short=is_short) == said


def test_what_settings_become_is_said_beside_what_they_were() -> None:
    before = Plan(
        (PoolPlan("m", 1, 8), PoolPlan("n", 1, 4)),
        (CascadePlan("auto", 0.5, 0.26), CascadePlan("other", math.inf, 0.4)),
    )
    cascades = (
        CascadePlan("auto", 0.7, 0.45),
        CascadePlan("other", 0.3, 0.4),
        CascadePlan("new", 0.3, 0.1),
    )
    settings = PlannedSettings(2, (("m", 4), ("n", 4), ("late", 2)), cascades)
    assert setting_words(before, settings) == [
        "m: 8 to 4 images a batch",
        "late: 2 images a batch",
        "auto: 26 to 45 % deferred",
        "other: threshold of the settings to 0.3",
        "new: 10 % deferred",
    ]
    same = PlannedSettings(2, (("m", 8), ("n", 4)), before.cascades)
    assert setting_words(before, same) == ["batch caps and thresholds"]


async def test_a_threshold_above_the_settings_is_shown_as_theirs() -> None:
    rounds = Rounds(MadeUpCell())
    report = await rounds.run(1)
    assert rounds.cluster.glance is not None
    observed = ObservedCascade("auto", "m", "n", "d", None, 0.8, None, None)
    seen = replace(rounds.cluster.glance.seen, cascades=(observed,))
    glance = replace(rounds.cluster.glance, seen=seen)
    cascades = (
        CascadePlan("auto", 0.845, 0.3, idle_threshold=0.9),
        CascadePlan("auto", 0.6, 0.2, idle_threshold=0.9),
        CascadePlan("another", 0.9, 0.3),
    )
    report = replace(report, plan=replace(report.plan, cascades=cascades))
    record = record_of(report, glance, None, Times(0.0, 0.1, 15.0))
    assert [(one.threshold, one.idle_threshold) for one in record.cascades] == [
        (math.inf, math.inf),
        (0.6, math.inf),
        (0.9, None),
    ]


async def test_a_dispatcher_that_is_away_is_waited_for() -> None:
    cell = MadeUpCell()
    rounds = Rounds(cell)
    cell.is_away = True
    report = await rounds.run(1)
    assert report.actions is None
    assert "away" in report.failures[0]
    cell.is_away = False
    assert (await rounds.run(1)).failures == ()


async def test_the_next_controller_goes_on_from_the_memory_of_the_last() -> None:
    cell = MadeUpCell()
    first = Rounds(cell)
    await first.run(8, per_s=2.0)
    # without it, the next one would not know of any demand
    later = Rounds(cell, first.loop.memory)
    cell.target = 1
    await later.run(1, per_s=2.0)
    assert cell.target == 3


async def test_replicas_that_never_come_are_given_up_and_tried_again_after_the_hold() -> None:
    cell = MadeUpCell()
    cell.most_ready = 2
    cell.limits = replace(LIMITS, apply_timeout_s=30.0)
    rounds = Rounds(cell)
    targets, records = [], []
    for _ in range(40):
        report = await rounds.run(1, per_s=2.0)
        targets.append(cell.target)
        times = Times(cell.now_s, 0.1, 15.0)
        records.append(record_of(report, rounds.cluster.glance, rounds.loop.memory, times))
    grown = targets.index(3)
    # more than 30 s of waiting, 30 s of holding, and both again, the hold twice as long
    assert targets[grown:] == ([3] * 7 + [2] * 6 + [3] * 7 + [2] * 12 + [3] * 9)[: 40 - grown]
    (first, second) = (one for one in records if one.rollbacks)
    assert [one.until_s for one in first.held] == [first.at_s + 30.0]
    assert [one.num_failures for one in second.held] == [2]
    assert first.pools[0].num_planned == 2
