"""The fewest steps are chosen on the one half, with a margin, and held to the other half."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fidelity.fewer_plan import (
    Check,
    ModelGrid,
    held_out_runs,
    model_grids,
    tuning_runs,
)
from benchmarks.fidelity.fewer_report import step_table, write_fewer_steps
from benchmarks.fidelity.fewer_steps import Study, _fewest
from benchmarks.fidelity.plan import BATCH, FidelityRun
from benchmarks.fidelity.work import Made
from ray_cluster.policies.fidelity import LEAST_SSIM

GRID = ModelGrid("shapes-sd", (4, 10), 10, (2, 3, 6), 1, 2, 1, 1, (Check(96),))
# what the images of so many steps are away from those of 10, in levels
ERRORS = {2: 60.0, 3: 15.0, 4: 4.0, 6: 4.0, 10: 0.0}


def made(run: FidelityRun, error: float) -> Made:
    shape = (BATCH, run.px, run.px, 3)
    clean = np.random.default_rng(run.batch).uniform(60, 190, shape)
    noise = np.random.default_rng(1000 + run.num_steps).normal(0, 1, shape)
    images = (clean + error * noise).round().clip(0, 255).astype(np.uint8)
    seconds = (0.1,) * run.num_steps
    whole_s = 0.2 + sum(seconds)
    return Made(images, seconds, seconds, (0,) * run.num_steps, whole_s, whole_s)


def study(held_out_error: float = 1.0) -> Study:
    """All runs; held-out images are so many times as far off as those to choose by."""
    runs = {run: made(run, ERRORS[run.num_steps]) for run in tuning_runs(GRID)}
    chosen = Study(GRID, runs).chosen()
    for run in held_out_runs(GRID, chosen):
        runs[run] = made(run, held_out_error * ERRORS[run.num_steps])
    return Study(GRID, runs)


def test_the_fewest_steps_keep_the_bar_with_a_margin_and_so_do_all_that_are_more() -> None:
    assert _fewest({2: 0.9, 3: 0.96, 4: 0.97, 5: 0.99}, 0.95) == 4
    assert _fewest({2: 0.99, 3: 0.96, 4: 0.97, 5: 0.99}, 0.95) == 4
    assert _fewest({2: 0.9, 3: 0.95}, 0.95) is None
    assert _fewest({}, 0.95) is None


def test_what_is_chosen_never_falls_with_the_steps_asked_for() -> None:
    found = study()
    assert found.chosen() == {4: {"balanced": 4, "fast": 3}, 10: {"balanced": 6, "fast": 3}}
    worst = found.tuning_worst(10)
    assert worst[2] < worst[3] < LEAST_SSIM["balanced"] < worst[6]


def test_held_out_images_are_reported_beside_the_time_they_save() -> None:
    by_cell = {(one.mode, one.asked, one.check.px): one for one in study().outcomes()}
    assert len(by_cell) == 6
    one = by_cell["balanced", 10, 64]
    assert (one.steps, one.num_images, one.is_kept) == (6, 2 * BATCH, True)
    assert one.cpu_share == pytest.approx(0.8 / 1.2)
    assert by_cell["balanced", 10, 96].tuning_worst is None


def test_a_mode_that_other_images_break_gets_all_steps() -> None:
    good, bad = study(), study(held_out_error=4.0)
    table, broken = (step_table(one, one.outcomes()) for one in (good, bad))
    assert table is not None
    assert table["fidelity"]["steps"][1]["balanced"] == 6
    assert table["fidelity"]["steps"][1]["balanced_ssim"] >= LEAST_SSIM["balanced"]
    assert broken is None


def test_nothing_is_chosen_by_what_is_reported() -> None:
    for grid in model_grids(quick=False):
        chosen = {base: {"balanced": base, "fast": base} for base in grid.base_steps}
        reported = {run.batch for run in held_out_runs(grid, chosen)}
        assert not reported & {run.batch for run in tuning_runs(grid)}
        main = [run for run in held_out_runs(grid, chosen) if run.num_steps == grid.main_base]
        batches = {run.batch for run in main if (run.px, run.guidance) == (64, None)}
        assert len(batches) * BATCH >= 300


def test_the_report_tells_all_of_it(tmp_path: Path) -> None:
    work, folder = tmp_path / "work", tmp_path / "report"
    work.mkdir()
    found = study()
    for run, one in found._made.items():
        one.save(work / f"{run.name}.npz")
    header = {"machine": {"cpu": "some"}, "started": "2026-11-23T00:00", "commit": "0" * 40}
    write_fewer_steps([GRID], work, folder, header)
    text = (folder / "report.md").read_text()
    assert "| balanced | 10 | 6 | 16 |" in text
    assert "Held out, 6 of 6 rows keep their bar." in text
    assert json.loads((folder / "shapes-sd.json").read_text())["fidelity"]["sampler"] == "ddim"
    assert (folder / "fewer-steps.png").exists()
    assert (folder / "images-shapes-sd.png").exists()
