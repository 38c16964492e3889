"""Published planners decide as published: by their optima and by their rules."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.baselines.cascade_choice import highest_share, highest_threshold
from ray_cluster.policies.baselines.fixed_cascades import all_heavy, all_light, for_the_peak
from ray_cluster.policies.baselines.random_scaling import RandomScalingPlanner
from ray_cluster.policies.baselines.threshold_maximising import ThresholdPlanner
from ray_cluster.policies.planning.cluster_state import (
    ClusterState,
    DeviceState,
    ModelState,
    PoolState,
    ServiceState,
)
from ray_cluster.policies.planning.fleet import (
    CascadeSpec,
    DeviceSpec,
    Fleet,
    PoolSpec,
    ServiceSpec,
)
from ray_cluster.policies.planning.plan import Plan
from tests.policies.cascades import DEFERRALS, FID, SD15, SD_TURBO

FLEET = Fleet(
    (DeviceSpec("A100", 0),),
    (
        PoolSpec("light", "sd-turbo", "A100", SD_TURBO),
        PoolSpec("heavy", "sd-1.5", "A100", SD15),
    ),
    (ServiceSpec("images", "sd-turbo", 5.0, CascadeSpec("sd-1.5", FID, DEFERRALS, 0.01)),),
)


def state(
    now_s: float = 0.0,
    num_arrived: int = 0,
    *,
    waiting: tuple[int, int] = (0, 0),
    num_missed: int = 0,
    num_gpus: int = 16,
) -> ClusterState:
    return ClusterState(
        now_s,
        (DeviceState("A100", num_gpus),),
        (PoolState("light", 2), PoolState("heavy", 14)),
        (ModelState("sd-turbo", waiting[0]), ModelState("sd-1.5", waiting[1])),
        (ServiceState("images", num_arrived, num_missed=num_missed),),
    )


def planned(planner: ThresholdPlanner | RandomScalingPlanner, *states: ClusterState) -> Plan:
    memory = planner.begin(state())  # type: ignore[var-annotated]
    plan = Plan()
    for one in states:
        plan, memory = planner.plan(one, memory)  # type: ignore[arg-type]
    return plan


@pytest.mark.parametrize(
    ("demand", "threshold", "rate"),
    [
        (16, 0.485, 0.964),
        (20, 0.26, 0.722),
        (24, 0.215, 0.602),
        (28, 0.15, 0.514),
        (32, 0.1, 0.449),
    ],
)
def test_the_highest_threshold_is_the_published_optimum(
    demand: int, threshold: float, rate: float
) -> None:
    # enough confidences to tell thresholds half a percent apart
    plan = planned(ThresholdPlanner(FLEET, window_size=20_000), state(10.0, 10 * demand))
    cascade = plan.cascade("images")
    assert cascade is not None
    assert cascade.threshold == pytest.approx(threshold)
    assert cascade.deferral_rate == pytest.approx(rate, abs=0.001)
    assert (cascade.reserve_s, cascade.when_late) == (None, "drop")
    assert sum(one.num_replicas for one in plan.pools) == 16


def test_a_queue_delays_by_its_length_over_the_arrivals() -> None:
    calm = planned(ThresholdPlanner(FLEET), state(10.0, 200))
    # 16 images at 20/s wait 0.8 s: with them a batch of 4 takes too long
    queued = planned(ThresholdPlanner(FLEET), state(10.0, 200, waiting=(24, 0)))
    batches = [plan.pool("heavy").max_batch for plan in (calm, queued)]  # type: ignore[union-attr]
    assert batches == [4, 4]
    light = [plan.pool("light").max_batch for plan in (calm, queued)]  # type: ignore[union-attr]
    assert light[1] < light[0]


def test_without_a_solution_the_last_plan_stays() -> None:
    before = planned(ThresholdPlanner(FLEET), state(10.0, 200))
    after = planned(ThresholdPlanner(FLEET), state(10.0, 200), state(20.0, 400, waiting=(999, 0)))
    assert after.pools == before.pools
    assert after.infeasible is not None


def test_demand_is_a_moving_average_times_a_factor() -> None:
    # 20/s, then 40/s: 30/s on average
    plan = planned(ThresholdPlanner(FLEET, window_size=20_000), state(10.0, 200), state(20.0, 600))
    direct = planned(ThresholdPlanner(FLEET, window_size=20_000), state(10.0, 300))
    assert plan.cascades == direct.cascades


def test_a_fixed_threshold_stays_while_replicas_follow() -> None:
    planner = ThresholdPlanner(FLEET, fixed_threshold=0.1)
    calm, busy = (planned(planner, state(10.0, 10 * demand)) for demand in (5, 32))
    assert calm.cascades[0].threshold == busy.cascades[0].threshold == 0.1
    assert calm.pools != busy.pools


def test_batches_grow_by_one_and_halve_with_a_miss() -> None:
    planner = ThresholdPlanner(FLEET, adapts_batches=True)
    times = [state(2.0 * n, 20 * n) for n in range(1, 8)]
    grown = planned(planner, *times)
    assert [one.max_batch for one in grown.pools] == [8, 8]
    missed = planned(planner, *times, state(16.0, 160, num_missed=3))
    assert [one.max_batch for one in missed.pools] == [4, 4]


def test_a_wait_of_two_executions_leaves_no_room_for_the_heavy_model() -> None:
    plan = planned(ThresholdPlanner(FLEET, wait_by_execution=2.0), state(10.0, 100))
    assert plan.infeasible is not None
    assert [one.num_replicas for one in plan.pools] == [16, 0]
    assert plan.pools[0].max_batch == 16


def test_random_routing_takes_as_much_as_load_allows() -> None:
    plan = planned(RandomScalingPlanner(FLEET), state(10.0, 100))
    cascade = plan.cascades[0]
    assert cascade.routing == "random"
    # 16 heavy replicas of 2 images in 2.16 s carry 14.8/s
    assert cascade.heavy_share == 1.0
    busy = planned(RandomScalingPlanner(FLEET), state(10.0, 320))
    assert busy.cascades[0].heavy_share == pytest.approx(15 * 2 / 2.16 / 33.6)


def test_fixed_plans_are_what_their_names_say() -> None:
    light, heavy = all_light(FLEET, 16, max_batch=8).fixed, all_heavy(FLEET, 16, max_batch=4).fixed
    assert [one.num_replicas for one in light.pools] == [16, 0]
    assert light.cascades[0].threshold == 0
    assert [one.num_replicas for one in heavy.pools] == [0, 16]
    assert heavy.cascades[0].heavy_share == 1
    peak = for_the_peak(FLEET, 16, peak_per_s=33.6)
    assert peak.fixed.cascades[0].threshold == pytest.approx(0.1)
    memory = peak.begin(state())
    assert peak.plan(state(9.0, 999), memory) == (peak.fixed, None)
    with pytest.raises(ValueError, match="can't carry"):
        for_the_peak(FLEET, 1, peak_per_s=99.0)


def test_they_plan_one_cascade_on_equal_gpus_and_say_so() -> None:
    with pytest.raises(ValueError, match="equal GPUs"):
        ThresholdPlanner(replace(FLEET, devices=FLEET.devices * 2)).begin(state())


def test_choices_are_none_where_nothing_fits() -> None:
    pair = [(BatchOption(1, 1.0), BatchOption(1, 2.0))]
    assert highest_threshold(pair, num_gpus=2, demand_per_s=5.0, rate_at=DEFERRALS.rate_at) is None
    assert highest_share(pair, num_gpus=2, demand_per_s=5.0) is None
    best = highest_share(pair, num_gpus=4, demand_per_s=3.0)
    assert best is not None
    assert (best.num_light, best.num_heavy) == (2, 2)
    assert best.rate == pytest.approx(1 / 3)
