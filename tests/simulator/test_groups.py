"""A simulated group keeps the rules of GPUs and steps under every policy."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.policies.sequence_parallel.sets import aligned_sets
from ray_cluster.policies.sequence_parallel.types import (
    DegreeMenu,
    GroupView,
    Planner,
    RoundDecision,
    menu_of,
)
from ray_cluster.simulator.events import EventQueue
from ray_cluster.simulator.groups.experiment import SpCondition, SpRun, run_tasks
from ray_cluster.simulator.groups.group import GroupOutcome, GroupTask, SimulatedGroup
from ray_cluster.simulator.groups.policies import planner_of
from tests.examples import a_few
from tests.simulator.group_rules import check_schedule, sp_experiment

POLICIES = (
    "rounds/most",
    "rounds/large",
    "widest",
    "moldable",
    "static/2-4-8-8/edf_backfill",
    "static/8-8-8-8/fcfs",
    "fixed/4",
    "knapsack/5/grid",
    "knapsack/1/events",
    "knapsack/2/idle",
)
MENU = menu_of("a", {1: 1.0, 2: 0.6, 4: 0.4}, num_gpus=4)


def task(
    request_id: int = 0, num_steps: int = 5, menu: DegreeMenu = MENU, **changes: Any
) -> GroupTask:
    one = GroupTask(
        request_id, menu, 0.0, 100.0, menu.step_s, tuple(map(float, range(num_steps + 1)))
    )
    return replace(one, **changes)


def scripted(*targets: tuple[float, dict[int, int]]) -> Planner:
    """A planner that answers by the clock: from each instant on, degrees by request.

    In the end, at 50 s, everybody left gets a GPU.
    """
    targets = (*targets, (50.0, dict.fromkeys(range(4), 1)))

    def plan(view: GroupView) -> RoundDecision:
        latest = max((one for one in targets if one[0] <= view.now_s), key=lambda one: one[0])
        later = [one[0] for one in targets if one[0] > view.now_s]
        degrees = tuple(latest[1].get(one.request_id, 0) for one in view.requests)
        return RoundDecision(degrees, look_again_s=min(later, default=float("inf")))

    return plan


def run(planner: Planner, *tasks: GroupTask, switch_s: float = 0.0) -> SpRun:
    done = run_tasks(tasks, planner, num_gpus=4, switch_s=switch_s, records=True)
    check_schedule(tasks, done.outcomes, done.stretches, num_gpus=4, switch_s=switch_s)
    return done


def test_a_sole_request_takes_its_steps_and_its_tail() -> None:
    menu = DegreeMenu("a", MENU.degrees, MENU.step_s, tail_s=0.5)
    (outcome,) = run(scripted((0.0, {0: 4})), task(menu=menu)).outcomes
    assert outcome.finish_s == pytest.approx(5 * 0.4 + 0.5)
    assert outcome.gpu_s == pytest.approx(4 * 5 * 0.4)
    assert outcome.is_on_time
    assert not replace(outcome, task=task(deadline_s=2.4)).is_on_time


def test_a_new_degree_counts_from_the_next_step_boundary_and_costs_a_switch() -> None:
    done = run(scripted((0.0, {0: 1}), (1.5, {0: 4})), task(), switch_s=0.1)
    first, second = done.stretches
    assert (first.num_steps, first.end_s) == (2, pytest.approx(2.0))
    assert second.first_step_s == pytest.approx(2.1)
    assert done.outcomes[0].finish_s == pytest.approx(2.1 + 3 * 0.4)


def test_what_is_given_up_stays_idle_until_it_is_all_there() -> None:
    planner = scripted((0.0, {0: 2, 1: 2}), (0.1, {0: 0, 1: 0, 2: 4}))
    done = run(planner, task(0), task(1, true_step_s=(2.0, 1.6, 0.8)), task(2, arrival_s=0.1))
    last = next(one for one in done.stretches if one.request_id == 2)
    assert last.begin_s == pytest.approx(1.6)


def test_one_that_wants_more_goes_on_until_it_can_have_it() -> None:
    planner = scripted((0.0, {0: 2, 1: 2}), (0.1, {0: 4, 1: 0}))
    slow = task(1, true_step_s=(2.0, 1.7, 0.8))
    (first, second) = [one for one in run(planner, task(0), slow).stretches if one.request_id == 0]
    assert (first.num_steps, len(first.gpus)) == (3, 2)
    assert len(second.gpus) == 4


def test_a_request_keeps_its_gpus_where_it_can() -> None:
    planner = scripted((0.0, {0: 1, 1: 1}), (0.5, {0: 0, 1: 2}))
    done = run(planner, task(0), task(1, num_steps=9))
    first, second = [one for one in done.stretches if one.request_id == 1][:2]
    assert set(first.gpus) <= set(second.gpus)


def test_gpus_are_aligned_sets_as_those_of_the_service_are() -> None:
    experiment = sp_experiment(num_arrivals=40)
    tasks = experiment.tasks(SpCondition("skewed", 40.0, 1.2), seed=7)
    planner = planner_of("knapsack/2/events", experiment.menus())
    done = run_tasks(tasks, planner, num_gpus=8, switch_s=0.01, records=True)
    assert {one.gpus for one in done.stretches} <= {
        tuple(gpus) for gpus in aligned_sets(8, [1, 2, 4, 8])
    }
    assert {len(one.gpus) for one in done.stretches} == {1, 2, 4, 8}


def test_a_dropped_request_ends_at_its_boundary_and_is_a_miss() -> None:
    def drop(view: GroupView) -> RoundDecision:
        ids = tuple(one.request_id for one in view.requests if one.request_id == 0 < view.now_s)
        return RoundDecision((1,) * len(view.requests), dropped=ids)

    group = run(drop, task(0), task(1, arrival_s=1.5))
    dropped = next(one for one in group.outcomes if one.task.request_id == 0)
    assert dropped.finish_s is None
    assert not dropped.is_on_time
    assert dropped.gpu_s == pytest.approx(2.0)


def test_accepted_are_finished_failed_and_running_at_any_time() -> None:
    experiment = sp_experiment(num_arrivals=40)
    menus, tasks = experiment.menus(), experiment.tasks(SpCondition("skewed", 40.0, 1.2), seed=3)
    events = EventQueue()
    ended: list[GroupOutcome] = []
    planner = planner_of("rounds/most", menus)
    group = SimulatedGroup(events, planner, num_gpus=8, switch_s=0.01, on_end=ended.append)
    for one in tasks:
        events.at(one.arrival_s, partial(group.add, one))
    for instant in np.linspace(0.0, tasks[-1].deadline_s, 200):
        events.run(until_s=float(instant))
        come = sum(one.arrival_s <= instant for one in tasks)
        assert come == len(ended) + group.num_running


def wait_for_each_step(group: SimulatedGroup, job: Any, step: int) -> None:
    """Stands for what passes unchanged steps in one event."""
    ends_s = job.step_end_s(step)
    job.timer = group._events.at(ends_s, partial(group._at_boundary, job, step))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_every_policy_keeps_the_rules_and_steps_at_once_change_nothing(
    policy: str, noise: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = sp_experiment(num_arrivals=40, step_noise=noise, time_error=noise)
    tasks = experiment.tasks(SpCondition("skewed", 40.0, 1.2), seed=5)
    runs = []
    for _ in range(2):
        planner = planner_of(policy, experiment.menus())
        runs.append(run_tasks(tasks, planner, num_gpus=8, switch_s=0.01, records=True))
        check_schedule(tasks, runs[-1].outcomes, runs[-1].stretches, num_gpus=8, switch_s=0.01)
        monkeypatch.setattr(SimulatedGroup, "_wait", wait_for_each_step)
    assert runs[0] == runs[1]


@a_few  # each is a simulated run
@given(st.integers(0, 10_000), st.sampled_from(POLICIES), st.sampled_from([4, 6, 8]))
def test_rules_hold_for_any_workload_and_number_of_gpus(
    seed: int, policy: str, num_gpus: int
) -> None:
    experiment = sp_experiment(num_arrivals=15, num_gpus=num_gpus)
    menus, tasks = (
        experiment.menus(),
        experiment.tasks(SpCondition("uniform", 50.0, 1.5), seed=seed),
    )
    done = run_tasks(
        tasks, planner_of(policy, menus), num_gpus=num_gpus, switch_s=0.02, records=True
    )
    check_schedule(tasks, done.outcomes, done.stretches, num_gpus=num_gpus, switch_s=0.02)


def test_more_gpus_keep_more_requests() -> None:
    experiment = sp_experiment(num_arrivals=150)
    menus, tasks = experiment.menus(), experiment.tasks(SpCondition("skewed", 24.0, 1.3), seed=2)
    on_time = [
        sum(
            one.is_on_time
            for one in run_tasks(
                tasks, planner_of("rounds/most", menus), num_gpus=num_gpus, switch_s=0.01
            ).outcomes
        )
        for num_gpus in (2, 4, 8, 16, 24)
    ]
    assert on_time == sorted(on_time)
    assert on_time[0] < on_time[2] < on_time[-1]
