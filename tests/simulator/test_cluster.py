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


def test_who_is_served_is_waited_for_and_nobody_else() -> None:
    cluster, _ = ready(CascadePlan("s", 1.0))
    cluster.scale("heavy", 0)
    for _ in range(9):
        cluster.offer(job(100.0, slo_s=100.0))
    cluster.cell.run_out()
    # all were deferred, and there is nobody for them
    assert (cluster.cell.num_open, len(cluster.fates)) == (9, 0)
    assert cluster.observe().model("h").num_waiting == 9
