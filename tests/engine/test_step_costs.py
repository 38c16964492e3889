"""The cost that an engine tells follows the steps that it takes."""

from __future__ import annotations

import random

import pytest

from ray_cluster.engine.step_costs import StepCosts
from ray_cluster.policies.cost_model import StepWork, step_s
from ray_cluster.policies.types import StepCost

MEASURED = StepCost(0.02, 1.0, decode_per_megapixel_s=3.0)
REAL = StepCost(0.02, 1.3, per_further_size_s=0.012)


def work_of(sides: list[int]) -> StepWork:
    megapixels = [side * side / 1e6 for side in sides]
    return StepWork(sum(megapixels), sum(one**2 for one in megapixels), len(set(megapixels)))


def drawn(rng: random.Random) -> StepWork:
    return work_of(rng.choices([64, 96, 128], k=rng.randint(1, 8)))


def mean_error(costs: StepCosts, rng: random.Random, speed: float) -> float:
    works = [drawn(rng) for _ in range(200)]
    errors = [abs(step_s(costs.current, one) / (speed * step_s(REAL, one)) - 1) for one in works]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_what_is_served_is_predicted_though_other_batches_were_measured(speed: float) -> None:
    costs, rng = StepCosts(MEASURED), random.Random(1)
    for _ in range(150):
        work = drawn(rng)
        costs.observe(work, speed * step_s(REAL, work) * rng.gauss(1, 0.05))
    assert mean_error(StepCosts(MEASURED), rng, speed) > 0.2
    assert mean_error(costs, rng, speed) < 0.05
    assert costs.current.decode_per_megapixel_s == 3.0


def test_a_machine_that_slows_down_is_followed_within_some_steps() -> None:
    costs, rng = StepCosts(MEASURED), random.Random(2)
    for speed, num_steps in ((1.0, 200), (2.5, 60)):
        for _ in range(num_steps):
            work = drawn(rng)
            costs.observe(work, speed * step_s(REAL, work))
    assert mean_error(costs, rng, 2.5) < 0.08


def test_stalls_do_not_bend_the_terms() -> None:
    costs, rng = StepCosts(MEASURED), random.Random(3)
    for number in range(200):
        work = drawn(rng)
        stall = 30.0 if number % 25 == 7 else 1.0
        costs.observe(work, stall * step_s(REAL, work))
    assert mean_error(costs, rng, 1.0) < 0.25
    ratio = costs.current.per_further_size_s / costs.current.per_megapixel_s
    assert ratio == pytest.approx(0.012 / 1.3, rel=0.3)
