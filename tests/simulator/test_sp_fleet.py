"""A fleet deals its requests out and loses none."""

from dataclasses import replace

import pytest

from ray_cluster.simulator.sp_experiment import SpCondition, SpExperiment, run_tasks, workload_of
from ray_cluster.simulator.sp_fleet import run_fleet
from ray_cluster.simulator.sp_policies import planner_of

EXPERIMENT = SpExperiment(num_arrivals=200)
MENUS, TASKS = workload_of(EXPERIMENT, SpCondition("uniform", 60.0, 1.3), seed=4)
PLANNER = planner_of("rounds/most", MENUS)


def test_a_fleet_of_one_group_is_that_group() -> None:
    fleet = run_fleet(TASKS, PLANNER, num_groups=1, num_gpus=8, switch_s=0.01)
    alone = run_tasks(TASKS, PLANNER, num_gpus=8, switch_s=0.01)
    assert fleet.num_requests == len(TASKS)
    assert fleet.num_on_time == sum(one.is_on_time for one in alone.outcomes)
    assert fleet.num_decisions == alone.num_decisions
    assert sum(fleet.requests_by_class.values()) == len(TASKS)


def test_more_groups_keep_more_requests_until_all_are_on_time() -> None:
    shares = [
        run_fleet(TASKS, PLANNER, num_groups=count, num_gpus=8, switch_s=0.01).num_on_time
        for count in (1, 3, 9, 60)
    ]
    assert shares == sorted(shares)
    assert shares[0] < shares[2]
    assert shares[-1] == len(TASKS)


def test_requests_that_come_at_once_go_to_different_groups() -> None:
    same = [replace(TASKS[0], request_id=number, arrival_s=0.0) for number in range(4)]
    tight = [replace(one, deadline_s=50 * one.menu.fastest_s + 1e-3) for one in same]
    assert run_fleet(tight, PLANNER, num_groups=4, num_gpus=8, switch_s=0.0).num_on_time == 4
    assert run_fleet(tight, PLANNER, num_groups=3, num_gpus=8, switch_s=0.0).num_on_time == 3


@pytest.mark.parametrize("policy", ["widest", "static/8-8-8-8/edf"])
def test_other_policies_serve_a_fleet_too(policy: str) -> None:
    run = run_fleet(TASKS, planner_of(policy, MENUS), num_groups=2, num_gpus=8, switch_s=0.01)
    assert run.num_requests == len(TASKS)
    assert 0 < run.num_on_time < len(TASKS)


def test_work_that_a_group_has_given_up_keeps_no_request_away() -> None:
    large = next(one for one in TASKS if one.menu.slo_class == "2048")
    small = next(one for one in TASKS if one.menu.slo_class == "256")
    # late by a little; then a small one, and a large one that needs a group of its own
    late = replace(large, request_id=0, arrival_s=0.0, deadline_s=4.8)
    soon = replace(small, request_id=1, arrival_s=0.1, deadline_s=0.7)
    tight = replace(large, request_id=2, arrival_s=0.2, deadline_s=5.15)
    run = run_fleet([late, soon, tight], PLANNER, num_groups=2, num_gpus=8, switch_s=0.0)
    assert run.on_time_by_class == {"256": 1, "2048": 1}
