"""What is chosen keeps its bar at the least cost, and what the other half breaks is left out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ray_cluster.config.sections.pools import FidelityConfig
from ray_cluster.policies.fidelity import LEAST_SSIM
from ray_cluster.policies.steps.reuse import ReuseSchedule
from ray_cluster.quality.calibration import Made, Plan, Run, Study

NEAR, FAR = ReuseSchedule(2, 2), ReuseSchedule(1, 5)
PLAN = Plan(((32, 32),), (4, 10), (2, 3, 6), (NEAR, FAR), 2)
# levels by which images are away from those with all steps
ERRORS = {2: 60.0, 3: 15.0, 4: 6.0, 6: 4.0, 10: 0.0}
NEAR_ERROR, FAR_ERROR = 3.0, 70.0
# a step that reuses, in whole steps
REUSED = {1: 0.2, 2: 0.5}


def made(run: Run, error: float) -> Made:
    clean = np.random.default_rng(run.batch).uniform(60, 190, (2, 32, 32, 3))
    noise = np.random.default_rng(1000 + run.num_steps).normal(0, 1, clean.shape)
    images = (clean + error * noise).round().clip(0, 255).astype(np.uint8)
    interval = 1 if run.schedule is None else run.schedule.interval
    reused = tuple(index % interval > 0 for index in range(run.num_steps))
    each_s = 1.0 if run.schedule is None else REUSED[run.schedule.num_outer]
    return Made(images, tuple(each_s if one else 1.0 for one in reused), reused)


def error_of(run: Run) -> float:
    if run.schedule is None:
        return ERRORS[run.num_steps]
    return ERRORS[run.num_steps] + (NEAR_ERROR if run.schedule == NEAR else FAR_ERROR)


def study(*, breaks: bool = False) -> Study:
    """All runs; if the other half breaks, its images with 3 steps or reuse are quite different."""
    runs = {run: made(run, error_of(run)) for run in PLAN.choosing()}
    choices = Study(PLAN, runs).choices()
    for run in PLAN.reporting(choices):
        is_broken = breaks and (run.schedule is not None or run.num_steps == 3)
        runs[run] = made(run, 200.0 if is_broken else error_of(run))
    return Study(PLAN, runs)


def of(choices: Iterable[object], asked: int, mode: str) -> tuple[int | None, str | None]:
    for choice in study().choices():
        if (choice.asked, choice.mode) == (asked, mode):
            fewer = choice.fewer and choice.fewer.run.num_steps
            return fewer, choice.reused and str(choice.reused.run.schedule)
    raise LookupError(asked)


def test_costs_of_reuse_are_those_of_its_steps() -> None:
    found = study()
    assert found.reused_cost == REUSED
    assert found.cost(Run(0, (32, 32), 10, NEAR)) == 5 + 0.5 * 5
    assert found.cost(Run(0, (32, 32), 10, FAR)) == 2 + 0.2 * 8


def test_the_cheapest_way_within_the_bar_is_chosen() -> None:
    choices = study().choices()
    assert of(choices, 10, "balanced") == (4, "outer2-every2")
    # 3 steps cost as much as the schedule's 4 of which 2 reuse
    assert of(choices, 10, "fast") == (3, None)
    # no fewer steps keep the bar, the schedule does
    assert of(choices, 4, "balanced") == (None, "outer2-every2")


def test_the_table_is_one_that_a_pool_takes() -> None:
    table = study().table(sampler="ddim", max_guidance_scale=2.0)
    assert table is not None
    rows = FidelityConfig.model_validate(table).table().rows
    assert [(row.asked, row.balanced, row.fast) for row in rows] == [(4, 4, 3), (10, 4, 3)]
    reuse = rows[0].balanced_reuse
    assert reuse is not None
    assert (reuse.num_steps, str(reuse.schedule), reuse.cost_share) == (4, "outer2-every2", 0.75)
    assert LEAST_SSIM["balanced"] <= reuse.ssim < 1


def test_what_the_other_half_breaks_is_left_out() -> None:
    table = study(breaks=True).table(sampler="ddim", max_guidance_scale=2.0)
    assert table is not None
    rows = FidelityConfig.model_validate(table).table().rows
    # what is balanced is fast too
    assert [(row.asked, row.balanced, row.fast) for row in rows] == [(4, 4, 4), (10, 4, 4)]
    assert not any(row.balanced_reuse or row.fast_reuse for row in rows)


def test_each_half_has_its_own_batches_and_nothing_is_chosen_of_the_second() -> None:
    choosing = list(PLAN.choosing())
    reporting = list(PLAN.reporting(study().choices()))
    assert {run.batch for run in choosing} == {0, 2}
    assert {run.batch for run in reporting} == {1, 3}
    assert len({run.name for run in choosing + reporting}) == len(choosing + reporting)
    assert not any(run.schedule == FAR for run in reporting)


def test_schedules_are_spread_over_the_depths_that_a_model_has() -> None:
    for num_blocks in (1, 2, 7, 28):
        plan = Plan.of([(64, 64)], [50, 20], range(1, 1 + num_blocks), 1)
        assert plan.asked == (20, 50)
        assert all(schedule.num_outer <= num_blocks for schedule in plan.schedules)
        assert len(plan.schedules) in {3 * min(3, num_blocks), 3 * num_blocks}
