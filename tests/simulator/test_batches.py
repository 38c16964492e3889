"""Replicas of whole images behind the dispatch core: batches, caps, drops, deaths, scores."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ray_cluster.policies.baselines.image_batches import InTimeBatches
from ray_cluster.policies.planning.plan import CascadePlan, PlannedSettings
from ray_cluster.policies.types import StepCost
from ray_cluster.simulator.cell.cell import CellSpec, Fate, PoolSpec, SimulatedCell
from ray_cluster.simulator.control.cluster import SimulatedCluster, whole_image
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.noise import Hardware
from tests.simulator.clusters import FLEET, job

# of one and of four images
ONE_S, FOUR_S = 1.5, 2.5


def batch_s(num: int) -> float:
    return ONE_S + (num - 1) / 3


POOL = PoolSpec(
    *("light", "l", 0, Hardware(StepCost(0.5, 0.5), batch_s=batch_s), 4, 4),
    policy=InTimeBatches(batch_s),
    cap=4,
)


class Desk(SimulatedCell):
    """A cell that notes when which request got its image or was given up."""

    def __init__(self, *names: str) -> None:
        super().__init__(CellSpec((POOL,)), on_end=self._note)
        self.made_s: dict[int, float] = {}
        self.hopeless_s: dict[int, float] = {}
        self.gone: list[str] = []
        self.start()
        for name in names:
            self.bring_up(POOL, name)

    def _note(self, request_id: str, fate: Fate) -> None:
        ends_s = self.made_s if fate.end == "finished" else self.hopeless_s
        ends_s[int(request_id)] = fate.end_s

    def offer(self, *numbers: int, slo_s: float = 20.0) -> None:
        for number in numbers:
            self.arrive(f"{number}", whole_image(self.events.now_s, "l", slo_s))

    def leave(self, name: str) -> None:
        self.drain(name, lambda: self.gone.append(name))

    @property
    def num_waiting(self) -> int:
        return self.core.num_waiting


@pytest.fixture
def desk() -> Desk:
    return Desk("a")


def test_who_comes_while_a_batch_is_made_waits_at_the_dispatcher_for_the_next(desk: Desk) -> None:
    desk.offer(0)
    desk.events.run(1.0)
    desk.offer(1, 2, 3)
    assert desk.num_waiting == 3
    desk.events.run(60.0)
    three_s = ONE_S + batch_s(3)
    assert desk.made_s == pytest.approx({0: ONE_S, 1: three_s, 2: three_s, 3: three_s})


def test_the_most_urgent_go_first(desk: Desk) -> None:
    desk.set_cap("light", 1)
    for number, slo_s in enumerate((20.0, 19.0, 18.0, 18.5)):
        desk.offer(number, slo_s=slo_s)
    desk.events.run(60.0)
    assert list(desk.made_s) == [0, 2, 3, 1]


def test_places_of_the_hopeless_are_taken_before_a_batch_begins(desk: Desk) -> None:
    desk.offer(0)
    desk.events.run(1.0)
    desk.offer(1, 2, 3, slo_s=2.0)
    desk.offer(4, 5, 6, 7)
    desk.events.run(60.0)
    assert desk.hopeless_s == pytest.approx(dict.fromkeys((1, 2, 3), ONE_S))
    assert desk.made_s == pytest.approx({0: ONE_S, **dict.fromkeys((4, 5, 6, 7), ONE_S + FOUR_S)})


def test_a_replica_that_dropped_all_it_had_takes_what_comes_next(desk: Desk) -> None:
    desk.offer(0, slo_s=1.0)
    desk.events.run(5.0)
    assert desk.hopeless_s == {0: 0.0}
    desk.offer(1)
    desk.events.run(60.0)
    assert desk.made_s == pytest.approx({1: 5.0 + ONE_S})


def test_nobody_joins_a_batch_that_has_begun_with_free_places(desk: Desk) -> None:
    desk.offer(0)
    desk.events.run(0.5)
    # one is dropped and its place stays free: what comes then waits all the same
    desk.offer(1, slo_s=1.2)
    desk.offer(2)
    desk.events.run(2.0)
    desk.offer(3)
    assert desk.num_waiting == 1
    desk.events.run(60.0)
    assert desk.hopeless_s == pytest.approx({1: ONE_S})
    assert desk.made_s == pytest.approx({0: ONE_S, 2: 2 * ONE_S, 3: 3 * ONE_S})


def test_a_cap_holds_from_the_next_batch_on(desk: Desk) -> None:
    desk.set_cap("light", 1)
    desk.offer(*range(6))
    desk.events.run(1.0)
    desk.set_cap("light", 4)
    desk.events.run(2.0)
    desk.set_cap("light", 1)
    desk.events.run(60.0)
    ends_s = [ONE_S, *[ONE_S + FOUR_S] * 4, 2 * ONE_S + FOUR_S]
    assert list(desk.made_s.values()) == pytest.approx(ends_s)


def test_a_replica_that_drains_ends_its_batch_and_leaves_the_rest_to_others(desk: Desk) -> None:
    desk.set_cap("light", 1)
    desk.offer(0, 1)
    desk.leave("a")
    desk.events.run(10.0)
    assert (desk.made_s, desk.gone, desk.num_waiting) == ({0: ONE_S}, ["a"], 1)
    desk.bring_up(POOL, "b")
    desk.events.run(60.0)
    assert desk.made_s == {0: ONE_S, 1: 10.0 + ONE_S}


def test_a_replica_that_drains_goes_once_though_all_it_held_was_dropped(desk: Desk) -> None:
    desk.offer(0, slo_s=1.0)
    desk.leave("a")
    desk.events.run(10.0)
    assert (list(desk.hopeless_s), desk.gone) == ([0], ["a"])


def test_what_a_dead_replica_held_is_leased_anew_after_its_silence(desk: Desk) -> None:
    desk.offer(0)
    desk.events.run(0.9)
    desk.bring_up(POOL, "b")
    desk.fail("a")
    desk.events.run(4.0)
    # nobody knows it yet
    assert (desk.num_waiting, desk.made_s) == (0, {})
    desk.events.run(60.0)
    # it was last heard of when it took its lease
    assert desk.made_s == pytest.approx({0: 6.0 + ONE_S})


def test_requests_wait_for_the_first_replica_of_their_model() -> None:
    desk = Desk()
    desk.offer(0)
    desk.events.run(5.0)
    assert desk.num_waiting == 1
    desk.bring_up(POOL, "a")
    desk.events.run(60.0)
    assert desk.made_s == {0: 5.0 + ONE_S}


def test_how_uneven_the_batches_of_a_pool_are_is_learnt() -> None:
    events = EventQueue()
    cluster = SimulatedCluster(events, FLEET, {"gpu": 1}, np.random.default_rng(0), noise_cv=0.3)
    cluster.scale("light", 1)
    events.run(30.0)
    assert cluster.observe().pool("light").spread == 0
    for _ in range(300):
        cluster.offer(job(30.0, slo_s=1e4))
    events.run(1000.0)
    assert cluster.observe().pool("light").spread == pytest.approx(0.3, rel=0.15)
    assert cluster.observe().pool("heavy").spread == 0


def test_images_wait_for_a_scorer_and_not_on_the_light_model() -> None:
    (service,) = FLEET.services
    assert service.cascade is not None
    apart = replace(service, cascade=replace(service.cascade, num_scorers=1))
    events, fleet = EventQueue(), replace(FLEET, services=(apart,))
    cluster = SimulatedCluster(events, fleet, {"gpu": 4}, np.random.default_rng(0))
    cluster.apply(PlannedSettings(1, (("light", 4), ("heavy", 2)), (CascadePlan("s", 0.5),)))
    cluster.scale("light", 1)
    cluster.scale("heavy", 1)
    events.run(100.0)
    for confidence in (0.9, 0.9, 0.4):
        cluster.offer(job(100.0, confidence))
    cluster.cell.run_out()
    # the first alone, then two together in 4/3 s; scores of 0.5 s each, one after the other
    two_s = 101 + 4 / 3
    ends_s = [101.5, two_s + 0.5, two_s + 1.0 + 4.0]
    assert [one.end_s for one in cluster.fates] == pytest.approx(ends_s)
    assert [one.stage for one in cluster.fates] == ["light", "light", "heavy"]
    assert cluster.cell.num_open == 0
