"""No plan leaves a pool below its floor where the floors fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.planning.cluster_state import ClusterState, DeviceState
from ray_cluster.policies.planning.floors import Floor, above_floors
from ray_cluster.policies.planning.plan import Plan, PoolPlan

pools = st.lists(
    # GPUs of a replica, floor, planned replicas
    st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(0, 6)),
    min_size=1,
    max_size=5,
)


def cluster(num_gpus: int) -> ClusterState:
    return ClusterState(0.0, (DeviceState("d", num_gpus),), (), (), ())


def plan_of(*sizes: int) -> Plan:
    return Plan(tuple(PoolPlan(str(number), size, 4) for number, size in enumerate(sizes)))


def test_what_lacks_is_taken_from_the_pool_that_is_furthest_above_its_floor() -> None:
    floors = [Floor(str(number), "d", 1, least) for number, least in enumerate((1, 2, 0))]
    assert above_floors(plan_of(0, 3, 5), floors, cluster(8)) == plan_of(1, 3, 4)
    assert above_floors(plan_of(0, 8, 0), floors, cluster(8)) == plan_of(1, 7, 0)


def test_a_plan_that_is_merely_short_is_left_as_it_is() -> None:
    floors = [Floor("0", "d", 1, 1), Floor("1", "d", 1, 0)]
    short = Plan(plan_of(1, 0).pools, infeasible="1 lacks capacity")
    assert above_floors(short, floors, cluster(1)) is short


@given(pools, st.integers(0, 20))
def test_floors_hold_as_far_as_they_fit_in_their_order(
    given_pools: list[tuple[int, int, int]], num_gpus: int
) -> None:
    floors = [Floor(str(i), "d", each, least) for i, (each, least, _) in enumerate(given_pools)]
    planned = plan_of(*(size for _, _, size in given_pools))
    found = above_floors(planned, floors, cluster(num_gpus))
    left = num_gpus
    for floor, pool in zip(floors, found.pools, strict=True):
        fitting = min(floor.num_replicas, left // floor.gpus_per_replica)
        left -= fitting * floor.gpus_per_replica
        assert pool.num_replicas >= fitting
    used = [
        sum(f.gpus_per_replica * p.num_replicas for f, p in zip(floors, plan.pools, strict=True))
        for plan in (planned, found)
    ]
    # a plan that fits still does
    assert used[1] <= max(used[0], num_gpus)
