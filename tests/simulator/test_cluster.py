"""The simulated cluster serves in batches, defers as planned, and loses nothing to failures."""

from __future__ import annotations

import pytest

from ray_cluster.policies.planning.plan import CascadePlan, PlannedSettings
from ray_cluster.simulator.control.cluster import SimulatedCluster
from ray_cluster.simulator.control.scaling import Faults
from ray_cluster.simulator.events import EventQueue
from tests.simulator.clusters import job, simulated


def ready(plan: CascadePlan, **options: object) -> tuple[SimulatedCluster, EventQueue]:
    """One light and one heavy replica, both loaded, at 100 s."""
    cluster, events = simulated(**options)  # type: ignore[arg-type]
    cluster.apply(PlannedSettings(1, (("light", 4), ("heavy", 2)), (plan,)))
    cluster.scale("light", 1)
    cluster.scale("heavy", 1)
    events.run(100.0)
    return cluster, events


def test_low_confidence_is_deferred_and_high_confidence_answered() -> None:
    cluster, events = ready(CascadePlan("s", 0.5))
    cluster.offer(job(100.0, confidence=0.4))
    events.run(130.0)
    cluster.offer(job(130.0, confidence=0.6))
    events.run(1000.0)
    deferred, answered = cluster.fates
    # one image, its discrimination, and the heavy model's image
    assert (deferred.stage, deferred.end_s) == ("heavy", pytest.approx(105.5))
    assert (answered.stage, answered.end_s) == ("light", pytest.approx(131.5))


def test_a_batch_takes_what_waits_up_to_its_cap() -> None:
    cluster, events = ready(CascadePlan("s", 0.0))
    for _ in range(6):
        cluster.offer(job(100.0))
    events.run(1000.0)
    ends = [one.end_s for one in cluster.fates]
    # the first alone, four together, the last alone
    assert ends == pytest.approx([101.5, *[101.5 + 2.5] * 4, 104 + 1.5])


@pytest.mark.parametrize(("reserve_s", "answer"), [(None, None), (0.0, "light")])
def test_slack_decides_only_where_the_plan_lets_it(
    reserve_s: float | None, answer: str | None
) -> None:
    cluster, events = ready(CascadePlan("s", 1.0, reserve_s=reserve_s, when_late="drop"))
    cluster.offer(job(100.0, slo_s=3.0))
    events.run(1000.0)
    assert [one.stage for one in cluster.fates] == [answer]


def test_a_deferred_image_that_would_be_late_gets_the_light_answer_if_the_plan_says_so() -> None:
    cluster, events = ready(CascadePlan("s", 1.0, when_late="light"))
    cluster.offer(job(100.0, slo_s=3.0))
    events.run(1000.0)
    (outcome,) = cluster.fates
    assert (outcome.stage, outcome.is_met, outcome.is_kept) == ("light", True, True)


def test_a_request_that_never_could_be_in_time_is_dropped() -> None:
    cluster, events = ready(CascadePlan("s", 0.0))
    cluster.offer(job(100.0, slo_s=1.0))
    events.run(1000.0)
    assert [(one.stage, one.is_met) for one in cluster.fates] == [(None, False)]
    assert cluster.observe().service("s").num_missed == 1


def test_random_routing_sends_its_share_straight_to_the_heavy_model() -> None:
    cluster, events = ready(CascadePlan("s", 0.0, routing="random", heavy_share=0.6))
    cluster.offer(job(100.0))
    events.run(1000.0)
    assert [(one.stage, one.end_s) for one in cluster.fates] == [("heavy", pytest.approx(104.0))]


def test_a_replica_that_shrinks_away_finishes_its_batch() -> None:
    cluster, events = ready(CascadePlan("s", 0.0))
    cluster.offer(job(100.0))
    cluster.scale("light", 0)
    assert cluster.observe().pool("light").num_ready == 0
    events.run(1000.0)
    assert [one.end_s for one in cluster.fates] == pytest.approx([101.5])


def test_failures_lose_no_request_and_no_gpu_serves_twice_at_once() -> None:
    # the GPU pool asserts that nobody holds what another holds
    cluster, events = ready(CascadePlan("s", 0.3), faults=Faults(60.0, 15.0), noise_cv=0.2)
    cluster.scale("light", 2)
    cluster.scale("heavy", 2)
    for number in range(300):
        at_s = 100.0 + number
        confidence = (number * 7 % 10) / 10
        events.at(at_s, lambda t=at_s, c=confidence: cluster.offer(job(t, c, 60.0)))
    smallest = 4
    for at_s in range(110, 500, 10):
        events.run(float(at_s))
        smallest = min(smallest, cluster.observe().num_gpus("gpu"))
        arrived = cluster.observe().service("s").num_arrived
        assert arrived == len(cluster.fates) + cluster.cell.num_open
    assert smallest < 4
    assert len(cluster.fates) == 300
    served = sum(one.end == "finished" for one in cluster.fates)
    assert served > 200


def test_gpu_hours_count_loading_and_serving_and_nothing_after() -> None:
    cluster, events = simulated()
    cluster.scale("light", 2)
    events.run(1800.0)
    cluster.scale("light", 0)
    events.run(3600.0)
    assert cluster.gpu_hours == pytest.approx(1.0)


def test_a_replica_is_young_until_it_has_dwelt() -> None:
    cluster, events = simulated(dwell_s=30.0)
    cluster.scale("light", 1)
    events.run(29.0)
    assert cluster.observe().pool("light").num_young == 1
    events.run(31.0)
    assert cluster.observe().pool("light").num_young == 0


@pytest.mark.parametrize("faults", [None, Faults(600.0, 15.0)])
def test_who_is_served_is_waited_for_and_nobody_else(faults: Faults | None) -> None:
    cluster, _ = ready(CascadePlan("s", 1.0), faults=faults)
    cluster.scale("heavy", 0)
    for _ in range(9):
        cluster.offer(job(100.0, slo_s=100.0))
    cluster.cell.run_out()
    # all were deferred, and there is nobody for them
    assert (cluster.cell.num_open, len(cluster.fates)) == (9, 0)
    assert cluster.observe().model("h").num_waiting == 9


def test_the_state_is_that_of_now_and_names_everything() -> None:
    cluster, events = simulated()
    events.run(3.0)
    state = cluster.observe()
    assert (state.now_s, state.num_gpus("gpu")) == (3.0, 4)
    assert {one.pool for one in state.pools} == {"light", "heavy"}
    assert {one.service for one in state.services} == {"s"}


def test_replicas_load_before_they_serve_and_asking_twice_is_as_asking_once() -> None:
    cluster, events = simulated()
    for _ in range(3):
        cluster.scale("light", 2)
    pool = cluster.observe().pool("light")
    assert (pool.num_ready, pool.num_loading) == (0, 2)
    events.run(60.0)
    pool = cluster.observe().pool("light")
    assert (pool.num_ready, pool.num_loading) == (2, 0)


def test_more_replicas_than_gpus_come_when_others_shrink() -> None:
    cluster, events = simulated()
    cluster.scale("light", 3)
    cluster.scale("heavy", 3)
    events.run(60.0)
    assert cluster.observe().pool("heavy").num_ready == 1
    cluster.scale("light", 1)
    events.run(120.0)
    state = cluster.observe()
    assert (state.pool("light").num_ready, state.pool("heavy").num_ready) == (1, 3)


def test_arrivals_are_counted_once_and_what_waits_and_confidences_are_seen() -> None:
    cluster, events = simulated()
    for _ in range(3):
        cluster.offer(job(0.0))
    state = cluster.observe()
    assert (state.service("s").num_arrived, state.model("l").num_waiting) == (3, 3)
    cluster.scale("light", 1)
    events.run(60.0)
    cluster.offer(job(60.0))
    events.run(70.0)
    seen = cluster.observe().service("s")
    assert (seen.num_arrived, len(seen.confidences)) == (4, 4)
    assert cluster.observe().service("s").confidences == ()


def test_an_older_version_of_the_settings_is_ignored() -> None:
    cluster, events = ready(CascadePlan("s", 0.5))

    def defers(version: int, threshold: float) -> bool:
        """Whether the next request, of confidence 0.5, is deferred."""
        caps = (("light", 4), ("heavy", 2))
        cluster.apply(PlannedSettings(version, caps, (CascadePlan("s", threshold),)))
        cluster.offer(job(events.now_s))
        events.run(events.now_s + 30.0)
        return cluster.fates[-1].stage == "heavy"

    assert defers(5, 0.6)
    assert defers(4, 0.4)
    assert not defers(6, 0.4)
