"""Discriminators and ControlNets have replicas for those who call them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.planning.called_models import (
    Caller,
    HelperDemand,
    HelperSpec,
    settled_helpers,
    size_helpers,
    without_helpers,
)
from ray_cluster.policies.planning.cell_planner import CellPlanner, cell_planner
from ray_cluster.policies.planning.cluster_state import (
    ClusterState,
    DeviceState,
    PoolState,
    ServiceState,
)
from ray_cluster.policies.planning.fleet import DeviceSpec, Fleet, PoolSpec, ServiceSpec
from ray_cluster.policies.planning.plan import Plan, PoolPlan
from ray_cluster.policies.planning.planner import AllocationPlanner

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


def sized(
    spec: HelperSpec, calls_per_s: float | None, seen: ClusterState, peak_per_s: float | None = None
) -> PoolPlan:
    """What a helper gets where there are no models."""
    known = {} if calls_per_s is None else {spec.counters[0]: calls_per_s}
    recent = known if peak_per_s is None else {spec.counters[0]: peak_per_s}
    demand = HelperDemand(known, recent)
    sizes = size_helpers([spec], demand, seen)
    left = without_helpers(seen, [spec], sizes)
    free = {one.device: one.num_gpus for one in left.devices}
    (plan,) = settled_helpers([spec], sizes, demand, seen, Plan(), free)
    return plan


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
    plan = sized(JUDGE, demand, state(judges=present, young=young))
    assert (plan.num_replicas, plan.max_batch) == (wanted, 16)


def test_helpers_stay_for_a_recent_peak_but_are_not_started_for_it() -> None:
    assert sized(JUDGE, 0.0, state(judges=3), peak_per_s=14.0).num_replicas == 3
    assert sized(JUDGE, 0.0, state(judges=1), peak_per_s=14.0).num_replicas == 1


def test_helpers_of_unknown_demand_stay_as_they_are() -> None:
    assert sized(JUDGE, None, state(judges=3)).num_replicas == 3


def test_helpers_take_no_more_than_there_is() -> None:
    huge = HelperSpec("judge", "cpu", ("c",), 1.0, 16, gpus_per_replica=150)
    assert sized(huge, 100.0, state()).num_replicas == 2
    # of two, each gets what it lacks most
    twins = [replace(huge, name=name, counters=(name,), gpus_per_replica=100) for name in "ab"]
    demand = HelperDemand({"a": 100.0, "b": 300.0}, {})
    sizes = size_helpers(twins, demand, state())
    assert [one.num_replicas for one in sizes] == [1, 3]


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


def gpus(
    num: int, *, sd: int, edges: int, images: float = 0.0, steps: float = 0.0, t: float = 0.0
) -> ClusterState:
    """A cell of a model and its ControlNet that share GPUs."""
    return ClusterState(
        t,
        (DeviceState("cuda", 100 * num),),
        (PoolState("sd", sd), PoolState("edges", edges)),
        (),
        (ServiceState("m", images), ServiceState("control:edges", steps)),
    )


# a busy replica makes two images of twenty steps per second
EDGES = HelperSpec(
    "edges", "cuda", ("control:edges",), 200.0, 8, 100, callers=(Caller("sd", 40.0),)
)


def cell(least: int = 1, edges: HelperSpec = EDGES) -> CellPlanner:
    options = (BatchOption(1, 1.0), BatchOption(4, 2.0))
    pools = (PoolSpec("sd", "m", "cuda", options, 100, load_s=20.0, min_replicas=least),)
    fleet = Fleet((DeviceSpec("cuda"),), pools, (ServiceSpec("m", "m", 30.0),))
    return cell_planner(fleet, (edges,), dwell_s=60.0, slo_s=30.0)


def course(
    planner: CellPlanner, images_per_s: Sequence[float], steps_per_s: Sequence[float]
) -> list[tuple[int, int]]:
    """Replicas of model and ControlNet by rounds of five seconds; plans are carried out at once."""
    now, images, steps, found = (1, 1), 0.0, 0.0, []
    memory = planner.begin(gpus(8, sd=1, edges=1))
    for number, (image, step) in enumerate(zip(images_per_s, steps_per_s, strict=True), start=1):
        images, steps = images + 5 * image, steps + 5 * step
        seen = gpus(8, sd=now[0], edges=now[1], images=images, steps=steps, t=5.0 * number)
        plan, memory = planner.plan(seen, memory)
        now = plan.num_replicas("sd"), plan.num_replicas("edges")
        found.append(now)
    return found


def test_steps_without_bound_leave_the_models_what_they_need_to_call() -> None:
    calm, flood = [9.0] * 30, [50.0] * 10 + [5000.0] * 20
    # six replicas of the model call 240 times a second; two ControlNets answer 280
    assert set(course(cell(), calm, flood)[12:]) == {(6, 2)}


def test_after_a_burst_of_steps_all_is_as_before_within_five_rounds() -> None:
    steps = [50.0] * 12 + [2000.0] * 24 + [50.0] * 12
    found = course(cell(), [12.0] * 48, steps)
    assert found[11] == (7, 1)
    assert min(sd for sd, _ in found[3:]) >= 5
    assert set(found[36 + 5 :]) == {(7, 1)}


def test_a_helper_nobody_could_call_beside_it_is_not_started() -> None:
    one = gpus(1, sd=1, edges=0)
    planner = cell(least=0)
    plan, _ = planner.plan(replace(one, now_s=5.0), planner.begin(one))
    assert plan.num_replicas("edges") == 0


@given(
    st.integers(0, 10),
    st.integers(0, 4),
    st.lists(st.floats(0.0, 1e5), min_size=3, max_size=6),
    st.booleans(),
)
def test_no_demand_takes_a_model_below_a_floor_that_fits(
    num: int, least: int, steps_per_s: list[float], is_known: bool
) -> None:
    planner = cell(least, EDGES if is_known else replace(EDGES, callers=()))
    memory, steps = planner.begin(gpus(num, sd=0, edges=num)), 0.0
    for number, step in enumerate(steps_per_s, start=1):
        steps += 5 * step
        seen = gpus(num, sd=0, edges=num, images=40 * number, steps=steps, t=5.0 * number)
        plan, memory = planner.plan(seen, memory)
        sd, edges = plan.num_replicas("sd"), plan.num_replicas("edges")
        assert sd >= min(least, num)
        assert sd + edges <= num
        assert edges >= 1 or num <= max(1, least)
