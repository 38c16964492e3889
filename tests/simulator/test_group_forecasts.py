"""A forecast of a group ends requests about when a group that is simulated step by step does."""

from __future__ import annotations

from functools import partial
from random import Random
from statistics import median

from ray_cluster.policies.admission.forecast import ForecastView, forecast_s
from ray_cluster.policies.admission.replica_simulation import ForecastReplica
from ray_cluster.policies.sequence_parallel.menus import menu_of_request
from ray_cluster.policies.sequence_parallel.rounds import RoundOptions, plan_round
from ray_cluster.policies.types import DegreeCost, GroupCost, RequestView, StepCost
from ray_cluster.simulator.groups.experiment import run_tasks
from ray_cluster.simulator.groups.group import GroupTask
from tests.fakes import request_view

SPEED_UPS = {1: 1.0, 2: 1.9, 4: 3.3, 8: 5.0}
GROUP = GroupCost(
    8,
    tuple(DegreeCost(k, StepCost(0.004, 0.14 / one)) for k, one in SPEED_UPS.items()),
    token_px=16,
    switch_s=0.01,
)
PLANNER = partial(plan_round, options=RoundOptions(GROUP.guard, drops=False))


def step_by_step(requests: list[RequestView]) -> dict[str, float]:
    tasks = []
    for number, one in enumerate(requests):
        menu = menu_of_request(one, GROUP)
        pace = tuple(float(step) for step in range(one.num_steps + 1))
        tasks.append(GroupTask(number, menu, 0.0, one.deadline_s, menu.step_s, pace))
    run = run_tasks(tasks, PLANNER, num_gpus=8, switch_s=GROUP.switch_s)
    return {requests[one.task.request_id].request_id: one.finish_s or 0.0 for one in run.outcomes}


def test_ends_are_about_those_of_a_group_that_is_simulated_step_by_step() -> None:
    rng = Random(5)
    last, each = [], []
    for _ in range(150):
        requests = random_requests(rng)
        replica = ForecastReplica(GROUP.costs[-1].cost, 1, 16, held=requests, group=GROUP)
        found_s, truth_s = forecast_s(ForecastView(0.0, [replica])), step_by_step(requests)
        last.append(max(found_s.values()) / max(truth_s.values()))
        each += [abs(found_s[one] / truth_s[one] - 1) for one in truth_s]
    # changes wait for the ends of steps there, so a forecast is a little early
    assert 0.95 < median(last) <= 1.0
    assert all(0.75 < one < 1.05 for one in last)
    assert median(each) < 0.06


def random_requests(rng: Random) -> list[RequestView]:
    sides_px = rng.choices([256, 512, 1024, 2048], k=rng.randint(1, 8))
    return [
        request_view(
            f"r{number}",
            width_px=side_px,
            height_px=side_px,
            num_steps=rng.randint(10, 50),
            deadline_s=rng.uniform(0.5, 40.0),
        )
        for number, side_px in enumerate(sides_px)
    ]
