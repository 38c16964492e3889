"""Discriminators and ControlNets have replicas for those who call them."""

from __future__ import annotations

import pytest

from ray_cluster.policies.allocation_problem import BatchOption
from ray_cluster.policies.cell_planner import CellPlanner
from ray_cluster.policies.cluster_state import ClusterState, DeviceState, PoolState, ServiceState
from ray_cluster.policies.fleet import DeviceSpec, Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.helpers import HelperSpec, size_helpers
from ray_cluster.policies.plan import Plan
from ray_cluster.policies.planner import AllocationPlanner

JUDGE = HelperSpec("judge", "cpu", ("score:judge",), rate_per_s=10.0, max_batch=16)


def state(now_s: float = 0.0, *, judges: int = 1, young: int = 0, **arrived: int) -> ClusterState:
    return ClusterState(
        now_s,
        (DeviceState("cpu", 400),),
        (PoolState("m", 1), PoolState("judge", judges, num_young=young)),
        (),
        (
            ServiceState("m", arrived.get("m", 0)),
            ServiceState("score:judge", arrived.get("scored", 0)),
        ),
    )


@pytest.mark.parametrize(
    ("demand", "present", "young", "wanted"),
    [
        (0.0, 1, 0, 1),
        # a replica answers 7 calls per second of its 10
        (7.0, 1, 0, 1),
        (7.1, 1, 0, 2),
        # the second one stays until the demand would fit with 4.9 each
        (5.0, 2, 0, 2),
        (4.8, 2, 0, 1),
        (0.0, 5, 0, 1),
        (0.0, 5, 3, 3),
    ],
)
def test_helpers_follow_demand_but_not_every_move_of_it(
    demand: float, present: int, young: int, wanted: int
) -> None:
    seen = state(judges=present, young=young)
    (plan,) = size_helpers([JUDGE], {"score:judge": demand}, seen)
    assert (plan.num_replicas, plan.max_batch) == (wanted, 16)


def test_helpers_of_unknown_demand_stay_as_they_are() -> None:
    (plan,) = size_helpers([JUDGE], {}, state(judges=3))
    assert plan.num_replicas == 3


def test_helpers_take_no_more_than_there_is() -> None:
    huge = HelperSpec("judge", "cpu", ("c",), 1.0, 16, gpus_per_replica=150)
    (plan,) = size_helpers([huge], {"c": 100.0}, state())
    assert plan.num_replicas == 2


def plans(planner: CellPlanner, *states: ClusterState) -> list[Plan]:
    memory, found = planner.begin(states[0]), []
    for one in states:
        plan, memory = planner.plan(one, memory)
        found.append(plan)
    return found


def fleet_of(*services: str) -> AllocationPlanner:
    pools = tuple(
        PoolSpec(name, name, "cpu", (BatchOption(1, 1.0),), 50, min_replicas=1) for name in services
    )
    specs = tuple(ServiceSpec(name, name, 60.0) for name in services)
    return AllocationPlanner(Fleet((DeviceSpec("cpu"),), pools, specs))


def test_models_get_what_helpers_leave() -> None:
    judge = HelperSpec("judge", "cpu", ("score:judge",), 10.0, 16, gpus_per_replica=100)
    planner = CellPlanner(fleet_of("m"), (judge,))
    busy = [state(2.0 * n, m=200 * n, scored=40 * n) for n in range(12)]
    plan = plans(planner, *busy)[-1]
    judges, models = plan.pool("judge"), plan.pool("m")
    assert judges is not None
    assert models is not None
    # of 4 CPUs three score 20 images per second, and one is two halves
    assert (judges.num_replicas, models.num_replicas) == (3, 2)
    assert plan.infeasible is not None


def test_what_is_known_of_a_service_outlives_a_change_of_the_fleet() -> None:
    one, both = CellPlanner(fleet_of("m")), CellPlanner(fleet_of("m", "n"))
    memory = one.begin(state())
    for number in range(1, 8):
        _, memory = one.plan(state(2.0 * number, m=2 * number), memory)
    known = memory.services[0].demand.level_per_s
    assert known is not None
    _, memory = both.plan(state(16.0, m=16), memory)
    assert [spec.service for spec in memory.services] == ["m", "n"]
    assert memory.services[0].demand.level_per_s == pytest.approx(known, rel=0.3)
    _, memory = one.plan(state(18.0, m=18), memory)
    assert [spec.service for spec in memory.services] == ["m"]
