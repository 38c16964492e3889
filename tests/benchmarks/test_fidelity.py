"""The frontier of reuse: what costs as much is compared, and a better variant is seen to be one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fidelity.choosing import choose
from benchmarks.fidelity.frontier import Frontier, mean_interval
from benchmarks.fidelity.plan import (
    BATCH,
    EXACT,
    FidelityRun,
    Grid,
    held_out_runs,
    quick_grid,
    schedules,
    tuning_runs,
)
from benchmarks.fidelity.work import Made, prompts_of

FULL_S, REUSED_S = 0.3, 0.1
VARIANT = "outer2-every2"


def made(error: float, num_reused: list[int], *, seed: int = 0) -> Made:
    """Images that are so far from the same pictures, and steps that take as long as their kind."""
    clean = np.random.default_rng(seed).uniform(60, 190, (BATCH, 64, 64, 3))
    noise = np.random.default_rng(seed + 1000 + len(num_reused)).normal(0, 1, clean.shape)
    seconds = tuple(REUSED_S if count else FULL_S for count in num_reused)
    images = (clean + error * noise).round().astype(np.uint8)
    return Made(images, seconds, seconds, tuple(num_reused))


def cell(variant_error: float) -> dict[FidelityRun, Made]:
    """Exact runs of 4, 6 and 10 steps, and one of 10 in which every other step reuses."""
    found = {}
    for batch in (0, 1):
        for steps, error in ((4, 30.0), (6, 20.0), (10, 0.0)):
            run = FidelityRun("shapes-sd", 64, batch, steps)
            found[run] = made(error, [0] * steps, seed=batch)
        run = FidelityRun("shapes-sd", 64, batch, 10, VARIANT)
        found[run] = made(variant_error, [0, BATCH] * 5, seed=batch)
    return found


@pytest.mark.parametrize(("error", "sign"), [(2.0, 1), (60.0, -1)])
def test_a_variant_is_held_against_as_many_steps_as_it_costs(error: float, sign: int) -> None:
    some = cell(error)
    frontier = Frontier(some)
    [point] = frontier.points(num_variants=6)
    # five of 0.3 s and five of 0.1 s are 6 2/3 steps of 0.3 s
    assert point.cost_steps == pytest.approx(20 / 3)
    assert point.share_reused == pytest.approx(0.5)
    assert set(point.quality) == {"tuning", "held-out"}
    found = point.quality["held-out"]
    assert found.num_images == BATCH
    exact = FidelityRun("shapes-sd", 64, 1, 10)
    by_steps = {
        steps: frontier.ssim(FidelityRun("shapes-sd", 64, 1, steps), exact) for steps in (6, 10)
    }
    control = 5 / 6 * by_steps[6] + 1 / 6 * by_steps[10]
    assert found.control_mean == pytest.approx(float(control.mean()))
    assert sign * found.gain_low > 0
    assert sign * found.gain_high > 0


def test_an_interval_has_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        low, high = mean_interval(rng.normal(1.0, 1.0, 60), alpha=0.2)
        hits += low <= 1.0 <= high
    assert 0.7 <= hits / 200 <= 0.9


def every(grid: Grid) -> dict[tuple[str, int], list[tuple[int, str]]]:
    """All variants of a grid, as if all of them were to be reported."""
    return {
        (model, px): [(steps, name) for steps in grid.base_steps for name in schedules(model)]
        for model in grid.models
        for px in grid.sizes_px
    }


def test_nothing_is_chosen_and_reported_on_the_same_prompts() -> None:
    grid = Grid()
    asked = [
        {
            (one.caption, seed)
            for run in found
            if run.px == 64
            for one, seed in prompts_of(run.batch)
        }
        for found in (list(tuning_runs(grid)), list(held_out_runs(grid, every(grid))))
    ]
    tuning, held_out = asked
    assert not tuning & held_out
    assert len(held_out) >= 300


def test_every_variant_is_chosen_from_with_exact_runs_around_it() -> None:
    for grid in (Grid(), quick_grid()):
        planned = list(tuning_runs(grid))
        assert len(set(planned)) == len({run.name for run in planned}) == len(planned)
        assert set(grid.base_steps) <= set(grid.control_steps)
        for model in {run.model for run in planned}:
            assert {run.variant for run in planned if run.model == model} == {
                EXACT,
                *schedules(model),
            }


def test_what_did_best_is_reported_beside_as_many_steps_as_it_costs() -> None:
    grid = Grid(base_steps=(10,), control_steps=(4, 6, 10), sizes_px=(64,), models=("shapes-sd",))
    some = cell(2.0)
    # it costs half as much as the other, and is far off
    cheap = FidelityRun("shapes-sd", 64, 0, 10, "outer2-every5")
    some[cheap] = made(80.0, [0, *[BATCH] * 9])
    tuning = {run: one for run, one in some.items() if run.half == "tuning"}
    [(where, kept)] = choose(grid, tuning).items()
    assert where == ("shapes-sd", 64)
    # it costs 6 2/3 steps; neither the other variant nor 4 steps keep to a mode
    assert set(kept) == {(10, VARIANT), (10, EXACT), (6, EXACT), (7, EXACT)}
    reported = list(held_out_runs(grid, {where: kept}))
    assert {run.half for run in reported} == {"held-out"}
    assert len({run.batch for run in reported}) == grid.num_held_out


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    one = made(3.0, [0, 8, 8])
    one.save(tmp_path / "run.npz")
    found = Made.load(tmp_path / "run.npz")
    assert np.array_equal(found.images, one.images)
    assert list(found.wall_s) == list(one.wall_s)
    assert list(found.num_reused) == [0, 8, 8]
