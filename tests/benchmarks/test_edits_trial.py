"""The trial of cached edits: a cache of the very step changes nothing; time is compared alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.edits.trial import Trial, in_16_bits, reusing, step
from benchmarks.edits.trial_figures import Cell, Judged, Way, least_times, rows_of
from ray_cluster.engine.step.executor import RowReuse

CELL = Cell(0.3, 2.0)
# of latents; what 16 bits lose is a tenth of it
TOLERANCE = 1e-3


@pytest.mark.parametrize("model", ["shapes-sd3", "shapes-sd"])
def test_a_step_over_what_it_would_have_kept_itself_is_the_exact_step(model: str) -> None:
    with torch.inference_mode():
        trial = Trial(model, 64, 2)
        rows = trial.rows(trial.subjects, CELL, 8)
        cut = trial.model.executor.num_outer[0]
        parts = [RowReuse(cut, is_by_patch=True) for _ in rows]
        exact = step(trial.model, rows, parts)
        found = {}
        for name, order in (("own", parts), ("other", parts[::-1])):
            own = []
            for row, part in zip(rows, order, strict=True):
                assert part.fresh is not None
                halves = [in_16_bits(kept_row) for kept_row in part.fresh]
                own.append(reusing(row, [tuple(halves)], Way(8, cut, "own"), trial.patch, 0))
                active = own[-1].active
                assert active is not None
                assert 0 < sum(active.is_active) < len(active.is_active)
            made = step(trial.model, rows, own)
            gaps = [(a.latents - b.latents).abs().max() for a, b in zip(made, exact, strict=True)]
            found[name] = float(max(gaps))
    assert found["own"] <= TOLERANCE < found["other"] / 10


def test_gains_are_over_exact_edits_that_take_as_long() -> None:
    cached = Way(8, 0, "empty prompt")
    quality = {Way(20): 1.0, Way(4): 0.8, Way(6): 0.9, cached: 0.95}
    judged = {(CELL, way): [_judged(ssim)] for way, ssim in quality.items()}
    costs = {(CELL, batch): {Way(8): [2.0] * 3, cached: [1.25] * 3} for batch in (1, 4)}
    rows = {row["way"]: row for row in rows_of(judged, costs)}
    row = rows[cached.name]
    assert row["step_b4"] == 0.625
    assert row["time_b4"] == 0.25
    # of five exact steps
    assert row["gain_ssim_inside_b4"] == [pytest.approx(0.1), 0.0]
    times = least_times(list(rows.values()))
    best = next(row for row in times if row["worst_ssim_at_least"] == 0.85)
    assert best["exact, fewer steps"] == "0.30 (6 steps)"
    assert best["empty prompt"] == "0.25 (8 steps, cut 0)"


def _judged(ssim: float) -> Judged:
    names = ("ssim_inside", "perceptual_inside", "ssim_ring", "is_shown")
    return {name: np.full(3, ssim) for name in names}
