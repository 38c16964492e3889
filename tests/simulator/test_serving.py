"""Whole images behind the production dispatch core: batches, caps, drops, drains and deaths."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from ray_cluster.simulator.control.requests import SimulatedRequest
from ray_cluster.simulator.control.serving import Serving
from ray_cluster.simulator.events import EventQueue
from tests.simulator.clusters import FLEET, job

# of one, two and four light images with their discrimination
ONE_S, FOUR_S = 1.5, 2.5


@dataclass
class Desk:
    """Serves the small fleet, and notes when which job got its image or was given up."""

    events: EventQueue = field(default_factory=EventQueue)
    made_s: dict[int, float] = field(default_factory=dict)
    hopeless_s: dict[int, float] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.serving = Serving(FLEET, self.events, self, seed=0)

    def on_made(self, model: str, job: SimulatedRequest) -> None:
        self.made_s[job.number] = self.events.now_s

    def on_hopeless(self, job: SimulatedRequest) -> None:
        self.hopeless_s[job.number] = self.events.now_s

    def bring_up(self, name: str, pool: str = "light") -> None:
        self.serving.bring_up(name, pool, on_drained=lambda: self.gone.append(name))

    def offer(self, *numbers: int, slo_s: float = 20.0) -> None:
        for number in numbers:
            self.serving.offer("l", job(number, self.events.now_s, slo_s=slo_s))


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.serving.set_cap("light", 4)
    desk.bring_up("a")
    return desk


def test_who_comes_while_a_batch_is_made_waits_at_the_dispatcher_for_the_next(desk: Desk) -> None:
    desk.offer(0)
    desk.events.run(1.0)
    desk.offer(1, 2, 3)
    assert (desk.serving.num_waiting("l"), desk.serving.num_in_batches("l")) == (3, 1)
    desk.events.run(60.0)
    three_s = ONE_S + 1.0 + 2 / 3 + 0.5
    assert desk.made_s == pytest.approx({0: ONE_S, 1: three_s, 2: three_s, 3: three_s})


def test_the_most_urgent_go_first(desk: Desk) -> None:
    desk.serving.set_cap("light", 1)
    desk.offer(0)
    desk.offer(1, slo_s=19.0)
    desk.offer(2, slo_s=18.0)
    desk.offer(3, slo_s=18.5)
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
    assert desk.serving.num_waiting("l") == 1
    desk.events.run(60.0)
    assert desk.hopeless_s == pytest.approx({1: ONE_S})
    assert desk.made_s == pytest.approx({0: ONE_S, 2: 2 * ONE_S, 3: 3 * ONE_S})


def test_a_cap_holds_from_the_next_batch_on(desk: Desk) -> None:
    desk.serving.set_cap("light", 1)
    desk.offer(*range(6))
    desk.events.run(1.0)
    desk.serving.set_cap("light", 4)
    desk.events.run(2.0)
    assert desk.serving.num_in_batches("l") == 4
    desk.serving.set_cap("light", 1)
    desk.events.run(60.0)
    ends_s = [ONE_S, *[ONE_S + FOUR_S] * 4, 2 * ONE_S + FOUR_S]
    assert list(desk.made_s.values()) == pytest.approx(ends_s)


def test_a_replica_that_drains_ends_its_batch_and_leaves_the_rest_to_others(desk: Desk) -> None:
    desk.serving.set_cap("light", 1)
    desk.offer(0, 1)
    desk.serving.drain("a")
    desk.events.run(10.0)
    assert desk.made_s == {0: ONE_S}
    assert desk.gone == ["a"]
    assert desk.serving.num_waiting("l") == 1
    desk.bring_up("b")
    desk.events.run(60.0)
    assert desk.made_s == {0: ONE_S, 1: 10.0 + ONE_S}


def test_a_replica_that_drains_goes_once_though_all_it_held_was_dropped(desk: Desk) -> None:
    desk.offer(0, slo_s=1.0)
    desk.serving.drain("a")
    desk.events.run(10.0)
    assert list(desk.hopeless_s) == [0]
    assert desk.gone == ["a"]


def test_what_a_dead_replica_held_is_leased_anew_after_its_silence(desk: Desk) -> None:
    desk.offer(0)
    desk.events.run(0.9)
    desk.bring_up("b")
    desk.serving.fail("a")
    desk.events.run(4.0)
    # nobody knows it yet
    assert (desk.serving.num_waiting("l"), desk.serving.num_in_batches("l")) == (0, 1)
    assert len(desk.serving.outlook("l").free_in_s) == 2
    desk.events.run(60.0)
    # it was last heard of when it took its lease
    assert desk.made_s == pytest.approx({0: 6.0 + ONE_S})
    assert len(desk.serving.outlook("l").free_in_s) == 1
    assert desk.gone == []


def test_requests_wait_for_the_first_replica_of_their_model() -> None:
    desk = Desk()
    desk.offer(0)
    desk.events.run(5.0)
    assert desk.serving.num_waiting("l") == 1
    desk.bring_up("a")
    desk.events.run(60.0)
    assert desk.made_s == {0: 5.0 + ONE_S}


def test_the_outlook_is_read_from_the_leases(desk: Desk) -> None:
    desk.bring_up("b")
    desk.bring_up("c")
    desk.offer(0, 1, 2)
    desk.serving.drain("c")
    desk.events.run(1.0)
    desk.offer(3, 4, 5, 6, 7)
    outlook = desk.serving.outlook("l")
    assert outlook.free_in_s == pytest.approx((ONE_S - 1.0, ONE_S - 1.0))
    assert (outlook.num_ahead, outlook.max_batch, outlook.batch_s) == (5, 4, FOUR_S)
    desk.events.run(2.0)
    assert desk.serving.outlook("l").free_in_s == pytest.approx((2 * ONE_S - 2, ONE_S + FOUR_S - 2))
    assert desk.serving.outlook("h").free_in_s == ()


def test_how_uneven_the_batches_of_a_pool_are_is_learnt() -> None:
    desk = Desk()
    desk.serving = Serving(FLEET, desk.events, desk, seed=0, noise_cv=0.3)
    desk.serving.set_cap("light", 1)
    desk.bring_up("a")
    assert desk.serving.spread("light") == 0
    desk.offer(*range(300), slo_s=1e4)
    desk.events.run(1000.0)
    assert desk.serving.spread("light") == pytest.approx(0.3, rel=0.15)
    assert desk.serving.spread("heavy") == 0
