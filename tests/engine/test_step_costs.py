"""The cost that an engine tells follows the steps that it takes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from ray_cluster.engine.batch.step_costs import StepCosts
from ray_cluster.policies.costs.cost_model import ExtraWork, StepWork, one_call_s, step_s
from ray_cluster.policies.steps.batch_layout import choose_layout
from ray_cluster.policies.types import StepCost

MEASURED = StepCost(0.02, 1.0, decode_per_megapixel_s=3.0)
REAL = StepCost(0.02, 1.3, per_further_size_s=0.012)


def work_of(sides: list[int]) -> StepWork:
    megapixels = [side * side / 1e6 for side in sides]
    squared = [one**2 for one in megapixels]
    return StepWork(sum(sorted(megapixels)), sum(sorted(squared)), len(set(megapixels)))


def drawn(rng: random.Random) -> StepWork:
    return work_of(rng.choices([64, 96, 128], k=rng.randint(1, 8)))


def take(costs: StepCosts, work: StepWork, lasts: Callable[[float], float]) -> None:
    """Observe a step that lasts what is made of its cost."""
    costs.observe(work, lasts(step_s(REAL, work)))


def mean_error(costs: StepCosts, rng: random.Random, speed: float) -> float:
    works = [drawn(rng) for _ in range(200)]
    errors = [abs(step_s(costs.current, one) / (speed * step_s(REAL, one)) - 1) for one in works]
    return sum(errors) / len(errors)


@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_what_is_served_is_predicted_though_other_batches_were_measured(speed: float) -> None:
    costs, rng = StepCosts(MEASURED), random.Random(1)
    for _ in range(300):
        take(costs, drawn(rng), lambda s: speed * s * rng.gauss(1, 0.05))
    assert mean_error(StepCosts(MEASURED), rng, speed) > 0.2
    assert mean_error(costs, rng, speed) < 0.05
    assert costs.current.decode_per_megapixel_s == 3.0


def test_a_machine_that_slows_down_is_followed_within_some_steps() -> None:
    costs, rng = StepCosts(MEASURED), random.Random(2)
    for speed, num_steps in ((1.0, 200), (2.5, 60)):
        for _ in range(num_steps):
            take(costs, drawn(rng), lambda s, speed=speed: speed * s)
    assert mean_error(costs, rng, 2.5) < 0.08


def test_stalls_do_not_bend_the_terms() -> None:
    costs, rng = StepCosts(MEASURED), random.Random(3)
    for number in range(400):
        stall = 30.0 if number % 50 == 7 else 1.0
        take(costs, drawn(rng), lambda s, stall=stall: stall * s)
    assert mean_error(costs, rng, 1.0) < 0.25
    ratio = costs.current.per_further_size_s / costs.current.per_megapixel_s
    assert ratio == pytest.approx(0.012 / 1.3, rel=0.3)


def served(costs: StepCosts, rng: random.Random, *, further_s: float, first_s: float) -> list[str]:
    """Return the layouts of 80 batches of three steps; one that shares a call takes longer once."""
    real = replace(REAL, per_further_size_s=further_s)
    apart = replace(real, per_further_size_s=real.fixed_s)
    layouts: list[str] = []
    were_shared: set[StepWork] = set()
    for _ in range(80):
        work = drawn(rng)
        for _ in range(3):
            layout = choose_layout(work.num_sizes, costs.current, step=len(layouts))
            layouts.append(layout)
            if layout == "grouped":
                costs.observe(work, one_call_s(apart, work), num_calls=work.num_sizes)
            else:
                is_dear = work.num_sizes > 1 and work not in were_shared
                were_shared.add(work)
                costs.observe(work, one_call_s(real, work) + first_s * is_dear)
    return layouts


def test_first_steps_of_their_sort_do_not_make_sizes_seem_dear() -> None:
    costs = StepCosts(replace(MEASURED, per_further_size_s=0.001))
    layouts = served(costs, random.Random(4), further_s=0.001, first_s=0.08)
    assert layouts.count("grouped") == 0
    ratio = costs.current.per_further_size_s / costs.current.fixed_s
    assert ratio == pytest.approx(0.001 / 0.02, rel=0.2)


def test_sizes_that_seemed_dear_are_tried_together_again() -> None:
    costs = StepCosts(replace(MEASURED, per_further_size_s=0.1))
    layouts = served(costs, random.Random(5), further_s=0.001, first_s=0.0)
    assert "grouped" in layouts[:60]
    assert "grouped" not in layouts[-60:]


def test_sizes_that_are_dear_stay_apart_but_for_the_trials() -> None:
    costs = StepCosts(replace(MEASURED, per_further_size_s=0.001))
    layouts = served(costs, random.Random(6), further_s=0.06, first_s=0.0)
    assert layouts[-96:].count("grouped") > 0.6 * 96


def test_images_of_a_few_steps_teach_though_no_step_is_like_the_one_before() -> None:
    costs = StepCosts(MEASURED)
    batches = [work_of([64] * count + [96] * (5 - count)) for count in range(6)]
    for number in range(120):
        work = batches[number % len(batches)]
        costs.observe(work, one_call_s(REAL, work))
    learnt = costs.current
    assert learnt.per_further_size_s == pytest.approx(REAL.per_further_size_s, rel=0.1)
    assert learnt.per_megapixel_s == pytest.approx(REAL.per_megapixel_s, rel=0.1)


def test_what_was_not_taken_for_long_is_made_anew() -> None:
    """Its first step tells nothing of its terms again: kernels are kept of the latest shapes."""
    alike, other = work_of([64] * 4), work_of([64] * 4 + [96])
    of_late = [work_of([8 * count]) for count in range(8, 264 + 8)]
    costs = StepCosts(REAL)
    for work in [alike, other] * 20:
        costs.observe(work, one_call_s(REAL, work))
    before = costs.current
    for work in of_late:
        costs.observe(work, step_s(REAL, work))
    for _ in range(8):
        costs.observe(other, 10 * step_s(REAL, other))
        for work in of_late[:256]:
            costs.observe(work, step_s(REAL, work))
    ratio = costs.current.per_further_size_s / costs.current.fixed_s
    assert ratio == pytest.approx(before.per_further_size_s / before.fixed_s, rel=0.05)


def test_an_idle_engine_forgets_how_slow_a_busy_machine_was() -> None:
    now_s = [0.0]
    costs, work = StepCosts(REAL, lambda: now_s[0]), work_of([64])
    for _ in range(50):
        now_s[0] += 10 * step_s(REAL, work)
        costs.observe(work, 10 * step_s(REAL, work))
    slow_s = step_s(costs.current, work)
    assert slow_s > 3 * step_s(REAL, work)
    now_s[0] += 5.0
    assert step_s(costs.current, work) == slow_s
    now_s[0] += 600.0
    assert step_s(costs.current, work) == pytest.approx(step_s(REAL, work), rel=0.01)
    # and as soon as it steps, what it observes counts
    for _ in range(4):
        now_s[0] += 3 * step_s(REAL, work)
        costs.observe(work, 3 * step_s(REAL, work))
    assert step_s(costs.current, work) > 2 * step_s(REAL, work)


def crowded(costs: StepCosts, *, tells_busy: bool) -> None:
    """Let small batches come to an idle machine, and large ones when two others compute, too."""
    rng = random.Random(7)
    for _ in range(300):
        is_crowded = rng.random() < 0.5
        work = work_of([64] * (rng.randint(3, 4) if is_crowded else 1))
        seconds = step_s(REAL, work) * rng.gauss(1, 0.05)
        stretch = 2.0 if is_crowded else 1.0
        costs.observe(work, stretch * seconds, busy_s=seconds if tells_busy else 0.0)


def dearness(cost: StepCost) -> float:
    """Return the seconds of a batch of eight over those of one image."""
    return step_s(cost, work_of([64] * 8)) / step_s(cost, work_of([64]))


def test_that_large_batches_come_when_others_are_busy_makes_pixels_no_dearer() -> None:
    costs, blind = StepCosts(REAL), StepCosts(REAL)
    crowded(costs, tells_busy=True)
    crowded(blind, tells_busy=False)
    assert dearness(costs.current) == pytest.approx(dearness(REAL), rel=0.05)
    assert dearness(blind.current) > 1.5 * dearness(REAL)


def test_the_speed_follows_whole_seconds_though_terms_follow_computing_ones() -> None:
    costs, rng = StepCosts(MEASURED), random.Random(8)
    for _ in range(300):
        work = drawn(rng)
        seconds = step_s(REAL, work) * rng.gauss(1, 0.05)
        costs.observe(work, 3 * seconds, busy_s=seconds)
    assert mean_error(costs, rng, 3.0) < 0.05


def test_waiting_for_control_nets_is_a_part_of_their_cost() -> None:
    costs, rng = StepCosts(REAL), random.Random(9)
    for number in range(400):
        work = work_of([64] * rng.randint(1, 4))
        seconds, waited_s = step_s(REAL, work), 0.0
        if number % 2:
            extra = ExtraWork(work.megapixels, work.squared_megapixels)
            work, waited_s = (
                replace(work, extra=extra),
                work.megapixels * 0.5 * REAL.per_megapixel_s,
            )
        costs.observe(work, 2 * (seconds + waited_s), busy_s=seconds)
    assert costs.current.control_share == pytest.approx(0.5, rel=0.15)
