"""Autoscaling by ongoing requests has Ray Serve's figures."""

from __future__ import annotations

from itertools import pairwise

import pytest
from ray.serve import autoscaling_policy as serve
from ray.serve.config import AutoscalingConfig

from ray_cluster.policies.allocation.problem import BatchOption
from ray_cluster.policies.baselines.ongoing_requests import OngoingRequestsPlanner
from ray_cluster.policies.planning.cluster_state import (
    ClusterState,
    DeviceState,
    ModelState,
    PoolState,
)
from ray_cluster.policies.planning.fleet import DeviceSpec, Fleet, PoolSpec, ServiceSpec

FLEET = Fleet(
    (DeviceSpec("gpu"),),
    (PoolSpec("pool", "m", "gpu", (BatchOption(4, 1.0),)),),
    (ServiceSpec("s", "m", 5.0),),
)


def state(now_s: float, ongoing: int, num_ready: int) -> ClusterState:
    models = (ModelState("m", ongoing // 2, ongoing - ongoing // 2),)
    return ClusterState(
        now_s, (DeviceState("gpu", 9),), (PoolState("pool", num_ready),), models, ()
    )


def targets(planner: OngoingRequestsPlanner, *ongoing: int) -> list[int]:
    """One round every 10 s; replicas are what was asked for."""
    memory = planner.begin(state(0.0, 0, 1))
    found, running = [], 1
    for number, one in enumerate(ongoing):
        plan, memory = planner.plan(state(10.0 * number, one, running), memory)
        running = plan.pools[0].num_replicas
        found.append(running)
    return found


def test_more_are_started_after_a_delay_and_stopped_after_a_longer_one() -> None:
    planner = OngoingRequestsPlanner(
        FLEET, (("pool", 4),), upscale_delay_s=30, downscale_delay_s=50, look_back_s=5
    )
    assert targets(planner, *[8] * 5, *[2] * 7) == [1, 1, 1, 4, 4, 4, 4, 4, 4, 4, 1, 1]


def test_a_change_that_is_no_longer_wanted_is_waited_for_anew() -> None:
    planner = OngoingRequestsPlanner(FLEET, (("pool", 4),), upscale_delay_s=20, look_back_s=5)
    assert targets(planner, 8, 8, 2, 8, 8, 8) == [1, 1, 1, 1, 1, 4]


def test_requests_are_averaged_over_the_look_back_window() -> None:
    planner = OngoingRequestsPlanner(FLEET, (("pool", 4),), upscale_delay_s=0, look_back_s=25)
    assert targets(planner, 2, 8, 8, 8)[-1] == 4
    assert targets(planner, 2, 8)[-1] == 3


def test_bounds_hold() -> None:
    planner = OngoingRequestsPlanner(
        FLEET, (("pool", 4),), upscale_delay_s=0, downscale_delay_s=0, look_back_s=5, max_replicas=6
    )
    assert targets(planner, 500, 500, 0) == [6, 6, 1]


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("ongoing", [0, 1, 7, 8, 20, 55])
@pytest.mark.parametrize("running", [1, 4, 10])
def test_the_wanted_number_is_serves_own(factor: float, ongoing: int, running: int) -> None:
    config = AutoscalingConfig(
        min_replicas=1,
        max_replicas=100,
        target_ongoing_requests=2,
        upscaling_factor=factor,
        downscaling_factor=factor,
    )
    theirs = serve._apply_scaling_factors(ongoing / 2, running, config)
    planner = OngoingRequestsPlanner(
        FLEET, (("pool", 4),), upscaling_factor=factor, downscaling_factor=factor
    )
    assert planner._desired(ongoing, running, running) == min(100, max(1, theirs))


def test_delays_are_serves_own() -> None:
    config = AutoscalingConfig(
        min_replicas=1, max_replicas=100, upscale_delay_s=20, downscale_delay_s=30
    )
    planner = OngoingRequestsPlanner(
        FLEET, (("pool", 4),), upscale_delay_s=20, downscale_delay_s=30
    )
    wanted = [3, 3, 3, 1, 1, 4, 4, 4, 2, 2, 2, 2, 2, 5]
    (memory,) = planner.begin(state(0.0, 0, 1))
    target, memory_of_serve = 1, {}
    for number, one in enumerate(wanted):
        now_s = 10.0 * number
        target, memory_of_serve = serve._apply_delay_logic(
            one, target, config, memory_of_serve, _now=now_s
        )
        reached, wants_up, since_s = planner._delayed(one, memory, now_s)
        memory = type(memory)("pool", reached, (), wants_up, since_s)
        assert reached == target, number
    assert any(a != b for a, b in pairwise(wanted))
