"""Plans follow counted arrivals, observed confidences and the replicas that are ready."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ray_cluster.policies.cascade import deferral_rate
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
from ray_cluster.policies.planning.planner import AllocationPlanner, Memory
from tests.policies.cascades import DEFERRALS, FID, SD15, SD_TURBO

FLEET = Fleet(
    (DeviceSpec("A100", 1),),
    (
        PoolSpec("light", "sd-turbo", "A100", SD_TURBO, load_s=40.0),
        PoolSpec("heavy", "sd-1.5", "A100", SD15, load_s=40.0),
    ),
    (ServiceSpec("images", "sd-turbo", 5.0, CascadeSpec("sd-1.5", FID, DEFERRALS, 0.01)),),
)


def state(
    now_s: float,
    num_arrived: int,
    *,
    ready: tuple[int, int] = (2, 14),
    loading: int = 0,
    in_batches: int = 0,
    confidences: tuple[float, ...] = (),
    num_direct: int = 0,
) -> ClusterState:
    return ClusterState(
        now_s,
        (DeviceState("A100", 16),),
        (PoolState("light", ready[0]), PoolState("heavy", ready[1], loading)),
        (ModelState("sd-turbo", 0, in_batches), ModelState("sd-1.5", 0, in_batches)),
        (ServiceState("images", num_arrived, num_direct, confidences=confidences),),
    )


def run(planner: AllocationPlanner, *states: ClusterState) -> tuple[Plan, Memory]:
    memory = planner.begin(state(0.0, 0))
    plan = Plan()
    for one in states:
        plan, memory = planner.plan(one, memory)
    return plan, memory


def steady(rate: int, **options: object) -> list[ClusterState]:
    return [state(2.0 * n, 2 * rate * n, **options) for n in range(1, 25)]  # type: ignore[arg-type]


def test_little_demand_defers_what_is_best_and_rents_few_gpus() -> None:
    plan, _ = run(AllocationPlanner(FLEET), *steady(4))
    assert plan.cascades[0].deferral_rate == pytest.approx(0.6)
    assert 3 <= sum(one.num_replicas for one in plan.pools) <= 8


def test_much_demand_takes_every_gpu_and_defers_less() -> None:
    plan, _ = run(AllocationPlanner(FLEET), *steady(30))
    assert sum(one.num_replicas for one in plan.pools) == 16
    assert 0.3 < plan.cascades[0].deferral_rate < 0.5


def test_who_has_seen_nothing_yet_stops_nothing() -> None:
    planner = AllocationPlanner(FLEET)
    plan, memory = planner.plan(state(0.0, 0), planner.begin(state(0.0, 0)))
    assert [one.num_replicas for one in plan.pools] == [2, 14]
    # that nobody came is known after a while
    for second in (2.0, 4.0):
        plan, memory = planner.plan(state(second, 0), memory)
    assert sum(one.num_replicas for one in plan.pools) < 16


def test_uneven_batches_are_planned_shorter() -> None:
    def caps(spread: float) -> list[int]:
        states = []
        for one in steady(30):
            pools = tuple(replace(pool, spread=spread) for pool in one.pools)
            states.append(replace(one, pools=pools))
        plan, _ = run(AllocationPlanner(FLEET), *states)
        return [pool.max_batch for pool in plan.pools]

    even, uneven = caps(0.0), caps(0.3)
    assert uneven[1] < even[1]
    # the expected light and heavy batches leave a standard deviation of both
    options = {one.batch: one.seconds for one in SD_TURBO}, {one.batch: one.seconds for one in SD15}
    both_s = sum(table[cap] for table, cap in zip(options, uneven, strict=True))
    assert (
        1.3 * both_s < 5.0 < 1.3 * sum(table[cap] for table, cap in zip(options, even, strict=True))
    )


def test_requests_in_flight_are_no_demand() -> None:
    calm, _ = run(AllocationPlanner(FLEET), *steady(10))
    slow, _ = run(AllocationPlanner(FLEET), *steady(10, in_batches=50))
    assert calm == slow


def test_the_threshold_is_for_the_replicas_that_are_ready() -> None:
    whole, _ = run(AllocationPlanner(FLEET), *steady(20))
    half, _ = run(AllocationPlanner(FLEET), *steady(20, ready=(2, 7), loading=7))
    assert half.pools[1].num_replicas == whole.pools[1].num_replicas
    assert half.cascades[0].deferral_rate < 0.75 * whole.cascades[0].deferral_rate


def test_a_model_whose_first_replica_is_to_come_counts_as_having_one() -> None:
    none, _ = run(AllocationPlanner(FLEET), *steady(4, ready=(0, 0), loading=1))
    one, _ = run(AllocationPlanner(FLEET), *steady(4, ready=(1, 1), loading=0))
    assert none.cascades[0].deferral_rate == one.cascades[0].deferral_rate > 0


def test_the_threshold_follows_the_confidences_that_are_seen() -> None:
    planner = AllocationPlanner(FLEET, window_size=100)
    low = tuple(0.001 * n for n in range(100))
    plan, memory = run(planner, *steady(10, confidences=low))
    assert memory[0].confidences is not None
    assert plan.cascades[0].threshold == pytest.approx(0.06)
    assert deferral_rate(memory[0].confidences, plan.cascades[0].threshold) == 0.6


def test_requests_that_skip_the_cascade_take_heavy_replicas() -> None:
    def states(direct: int) -> list[ClusterState]:
        return [state(2.0 * n, 40 * n, num_direct=direct * n) for n in range(1, 25)]

    without, _ = run(AllocationPlanner(FLEET), *states(0))
    some, _ = run(AllocationPlanner(FLEET), *states(16))
    # of 20 requests/s 8 skip it, and the other 12 share what is left
    assert some.cascades[0].deferral_rate < without.cascades[0].deferral_rate


def test_a_plan_depends_on_nothing_but_state_and_memory() -> None:
    planner = AllocationPlanner(FLEET)
    _, memory = run(planner, *steady(12))
    now = state(100.0, 1200)
    assert planner.plan(now, memory) == planner.plan(now, memory)


def test_models_alone_need_no_cascade() -> None:
    fleet = Fleet(
        (DeviceSpec("A100", 1),),
        (PoolSpec("p", "sd-1.5", "A100", SD15, load_s=40.0),),
        (ServiceSpec("images", "sd-1.5", 10.0),),
    )
    plan, _ = run(AllocationPlanner(fleet), *steady(8))
    # 8 images in 6.79 s each, and in the window each serves two thirds of the time
    assert 7 <= plan.pools[0].num_replicas <= 13
    assert plan.pools[0].max_batch == 8
    assert plan.cascades == ()


def test_demand_that_no_gpus_could_meet_is_said_to_be_infeasible() -> None:
    plan, _ = run(AllocationPlanner(FLEET), *steady(900))
    assert plan.infeasible is not None
    assert "sd-turbo of images" in plan.infeasible
    assert plan.pools[0].num_replicas == 16


def test_a_model_beside_a_cascade_is_planned_as_if_it_were_alone() -> None:
    """Its replicas' number and their cap, though thresholds are for those that are ready."""
    pool = PoolSpec("p", "m", "L4", SD15, load_s=40.0)
    service = ServiceSpec("m", "m", 10.0)
    alone = Fleet((DeviceSpec("L4", 1),), (pool,), (service,))
    beside = Fleet(
        (*FLEET.devices, *alone.devices), (*FLEET.pools, pool), (*FLEET.services, service)
    )

    def seen(one: ClusterState) -> ClusterState:
        return replace(
            one,
            devices=(*one.devices, DeviceState("L4", 16)),
            pools=(*one.pools, PoolState("p", 2, 6)),
            services=(*one.services, ServiceState("m", one.services[0].num_arrived)),
        )

    def planned(fleet: Fleet) -> Plan:
        planner = AllocationPlanner(fleet)
        memory = planner.begin(seen(state(0.0, 0)))
        for one in steady(8):
            plan, memory = planner.plan(seen(one), memory)
        return plan

    found = planned(beside)
    assert found.pools == (*planned(FLEET).pools, *planned(alone).pools)
    assert found.pools[2].max_batch == 8
