"""The bound is no less than what any schedule reaches, and hardly more."""

import random
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
import pytest
from scipy.optimize import linprog

from ray_cluster.policies.sequence_parallel.types import menu_of
from ray_cluster.simulator.groups.bound import bound_on_time, components_of
from ray_cluster.simulator.groups.experiment import SpCondition, run_tasks
from ray_cluster.simulator.groups.group import GroupTask
from ray_cluster.simulator.groups.policies import planner_of
from tests.simulator.group_rules import sp_experiment

SMALL = menu_of("small", {1: 1.0, 2: 0.7, 4: 0.6}, num_gpus=4)
LARGE = menu_of("large", {1: 6.0, 2: 3.2, 4: 1.8}, num_gpus=4)
PACE = (0.0, 1.0)


def random_tasks(rng: random.Random, count: int) -> list[GroupTask]:
    tasks = []
    for number in range(count):
        menu = rng.choice([SMALL, LARGE])
        arrival_s = rng.uniform(0.0, 3.0)
        deadline_s = arrival_s + menu.fastest_s * rng.uniform(0.9, 2.5)
        tasks.append(GroupTask(number, menu, arrival_s, deadline_s, menu.step_s, PACE))
    return tasks


def most_by_enumeration(tasks: list[GroupTask], num_gpus: int) -> int:
    """Try every subset on every mix of what may run beside each other between two instants."""
    return next(
        count
        for count in range(len(tasks), -1, -1)
        for some in combinations(tasks, count)
        if can_all_be_on_time(some, num_gpus)
    )


@dataclass(frozen=True)
class Column:
    """Seconds in which certain requests run at certain degrees."""

    span: int
    rates: tuple[float, ...]


def can_all_be_on_time(tasks: tuple[GroupTask, ...], num_gpus: int) -> bool:
    """Whether fluids that change at no cost can all be on time: exact, by linear programming."""
    if not tasks:
        return True
    instants = sorted({one.arrival_s for one in tasks} | {one.deadline_s for one in tasks})
    columns = []
    for span, begin_s in enumerate(instants[:-1]):
        menus = [
            [(0, 0.0), *((d, 1 / s) for d, s in zip(t.menu.degrees, t.true_step_s, strict=True))]
            if t.arrival_s <= begin_s < t.deadline_s
            else [(0, 0.0)]
            for t in tasks
        ]
        columns += [
            Column(span, tuple(rate for _, rate in some))
            for some in product(*menus)
            if sum(degree for degree, _ in some) <= num_gpus
        ]
    shares = -np.array([one.rates for one in columns]).T
    spans = np.array([[float(one.span == s) for one in columns] for s in range(len(instants) - 1)])
    result = linprog(
        np.zeros(len(columns)),
        A_ub=np.vstack([shares, spans]),
        b_ub=[*([-1.0 + 1e-9] * len(tasks)), *np.diff(instants)],
    )
    return bool(result.status == 0)


def test_the_bound_is_what_enumeration_finds_on_small_instances() -> None:
    rng = random.Random(7)
    equal = 0
    for _ in range(40):
        tasks = random_tasks(rng, rng.randint(1, 4))
        best = most_by_enumeration(tasks, 4)
        bound = bound_on_time(tasks, 4)
        assert bound.is_proven
        assert bound.num_on_time >= best
        equal += bound.num_on_time == best
    assert equal >= 39


def test_gang_cuts_see_that_two_requests_do_not_fit_beside_each_other() -> None:
    # seconds fit and GPU-seconds fit, but whoever runs on all GPUs runs alone
    wide = GroupTask(0, menu_of("w", {4: 1.0}, num_gpus=4), 0.0, 2.0, (1.0,), PACE)
    thin = GroupTask(1, menu_of("t", {1: 1.5}, num_gpus=4), 0.0, 2.0, (1.5,), PACE)
    assert bound_on_time([wide, thin], 4).num_on_time == 1
    assert bound_on_time([wide], 4).num_on_time == 1


def test_components_share_no_instant_and_leave_hopeless_requests_out() -> None:
    def task(number: int, arrival_s: float, deadline_s: float) -> GroupTask:
        return GroupTask(number, SMALL, arrival_s, deadline_s, SMALL.step_s, PACE)

    some = [task(0, 0.0, 2.0), task(1, 1.0, 3.0), task(2, 3.0, 4.0), task(3, 3.1, 3.5)]
    assert [[one.request_id for one in part] for part in components_of(some)] == [[0, 1], [2]]


@pytest.mark.parametrize("policy", ["rounds/most", "rounds/large", "widest", "knapsack/1/events"])
def test_no_policy_is_above_the_bound(policy: str) -> None:
    experiment = sp_experiment(num_arrivals=60, switch_s=0.0)
    for seed, cell in enumerate(
        (SpCondition("skewed", 18.0, 1.1), SpCondition("uniform", 18.0, 1.5))
    ):
        tasks = experiment.tasks(cell, seed)
        run = run_tasks(tasks, planner_of(policy, experiment.menus()), num_gpus=8, switch_s=0.0)
        on_time = sum(one.is_on_time for one in run.outcomes)
        assert on_time <= bound_on_time(tasks, 8).num_on_time
