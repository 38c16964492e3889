"""What every cluster behind the control loop must do; one suite for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from ray_cluster.control.loop import Cluster
from ray_cluster.policies.planning.plan import CascadePlan, PlannedSettings
from ray_cluster.simulator.events import EventQueue
from tests.simulator.clusters import job, simulated


@dataclass
class Harness:
    """A cluster with 4 GPUs, pools "light" and "heavy" and a service "s".

    Attributes:
        wait: lets seconds pass.
        request: sends one request.
    """

    cluster: Cluster
    clock: EventQueue
    wait: Callable[[float], None]
    request: Callable[[], None]


def simulation() -> Harness:
    cluster, events = simulated()
    return Harness(
        cluster,
        events,
        wait=lambda seconds: events.run(events.now_s + seconds),
        request=lambda: cluster.offer(job(events.now_s)),
    )


@pytest.fixture(params=[simulation])
def harness(request: pytest.FixtureRequest) -> Harness:
    made: Harness = request.param()
    return made


def test_the_state_is_that_of_now_and_names_everything(harness: Harness) -> None:
    harness.wait(3.0)
    state = harness.cluster.observe()
    assert state.now_s == harness.clock() == 3.0
    assert state.num_gpus("gpu") == 4
    assert {one.pool for one in state.pools} == {"light", "heavy"}
    assert {one.service for one in state.services} == {"s"}


def test_replicas_load_before_they_serve(harness: Harness) -> None:
    harness.cluster.scale("light", 2)
    pool = harness.cluster.observe().pool("light")
    assert (pool.num_ready, pool.num_loading) == (0, 2)
    harness.wait(60.0)
    pool = harness.cluster.observe().pool("light")
    assert (pool.num_ready, pool.num_loading) == (2, 0)


def test_asking_twice_is_as_good_as_asking_once(harness: Harness) -> None:
    for _ in range(3):
        harness.cluster.scale("heavy", 2)
    harness.wait(60.0)
    assert harness.cluster.observe().pool("heavy").num_replicas == 2


def test_a_pool_shrinks_and_its_gpus_are_for_others(harness: Harness) -> None:
    harness.cluster.scale("light", 4)
    harness.wait(60.0)
    harness.cluster.scale("light", 1)
    harness.cluster.scale("heavy", 3)
    harness.wait(60.0)
    state = harness.cluster.observe()
    assert (state.pool("light").num_ready, state.pool("heavy").num_ready) == (1, 3)


def test_more_replicas_than_gpus_come_when_there_is_room(harness: Harness) -> None:
    harness.cluster.scale("light", 3)
    harness.cluster.scale("heavy", 3)
    harness.wait(60.0)
    assert harness.cluster.observe().pool("heavy").num_ready == 1
    harness.cluster.scale("light", 1)
    harness.wait(60.0)
    assert harness.cluster.observe().pool("heavy").num_ready == 3


def test_arrivals_are_counted_once_and_stay_counted(harness: Harness) -> None:
    for _ in range(3):
        harness.request()
    assert harness.cluster.observe().service("s").num_arrived == 3
    harness.wait(100.0)
    assert harness.cluster.observe().service("s").num_arrived == 3


def test_what_waits_is_seen(harness: Harness) -> None:
    for _ in range(3):
        harness.request()
    assert harness.cluster.observe().model("l").num_waiting == 3


def test_confidences_are_told_once(harness: Harness) -> None:
    harness.cluster.scale("light", 1)
    harness.wait(60.0)
    harness.request()
    harness.wait(10.0)
    assert len(harness.cluster.observe().service("s").confidences) == 1
    assert harness.cluster.observe().service("s").confidences == ()


def test_an_older_version_of_the_knobs_is_ignored(harness: Harness) -> None:
    def defers(version: int, threshold: float) -> bool:
        """Whether a request of confidence 0.5 waits for the heavy model, which has no replica."""
        harness.cluster.apply(
            PlannedSettings(version, (("light", 4), ("heavy", 2)), (CascadePlan("s", threshold),))
        )
        before = harness.cluster.observe().model("h").num_waiting
        harness.request()
        harness.wait(10.0)
        return harness.cluster.observe().model("h").num_waiting > before

    harness.cluster.scale("light", 1)
    harness.wait(60.0)
    assert defers(5, 0.6)
    assert defers(4, 0.4)
    assert not defers(6, 0.4)


def test_time_never_goes_back_and_calls_come_when_they_were_asked_for(harness: Harness) -> None:
    seen: list[float] = []
    harness.clock.after(2.0, lambda: seen.append(harness.clock()))
    harness.clock.after(1.0, lambda: seen.append(harness.clock())).call_off()
    harness.wait(5.0)
    assert seen == [2.0]
    assert harness.clock() == 5.0
