"""A ControlNet's residuals, in a batch of which some rows leave on the way in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.executor import Residuals
from ray_cluster.policies.reuse import ActivePatches
from tests.engine.harness import CALL_TOLERANCE, CONTROL_FACTOR, difference, request, start_all
from tests.engine.reusing import Company
from tests.engine.two_steps import SCALE, StepRow, batch_of, predict_batch

# r0 and r1 leave at different skip connections, r2 never does
_CUTS = (2, 4, None)
_Cuts = tuple[int | None, ...]


def rows_of(company: Company, *, by_patch: bool = False, cuts: _Cuts = _CUTS) -> list[StepRow]:
    requests = [
        request("r0", guidance_scale=SCALE),
        request("r1", guidance_scale=1.0, prompt="a blue square"),
        request("r2", guidance_scale=SCALE, width_px=104),
    ]
    generator = torch.Generator().manual_seed(0)
    executor: Any = company.model.executor
    found = []
    for state, cut in zip(start_all(company.model, requests), cuts, strict=True):
        shape = state.latents.shape
        latents = [torch.randn(shape, generator=generator) for _ in range(2)]
        owned = state.conditioning
        row = StepRow(executor.prepare(owned), owned.is_guided, cut, latents)
        if by_patch and cut is not None:
            row.active = ActivePatches(4, (True, False, False, True) * 4)
        num_rows = 1 + owned.is_guided
        encoded = executor.encode_half(batch_of(executor, [row], 0))
        for _ in range(2):
            shapes = [(num_rows, len(one) // num_rows, one.shape[1]) for one in encoded.skips]
            hidden = (num_rows, len(encoded.hidden) // num_rows, encoded.hidden.shape[1])
            shapes.append(hidden)
            row.more.append([0.1 * torch.randn(one, generator=generator) for one in shapes])
        found.append(row)
    return found


def predict(
    executor: Any, rows: Sequence[StepRow], step: int, *, adds: bool = True
) -> list[Tensor]:
    """What is predicted for each row in a step, with its residuals; what it keeps is noted."""
    batch = batch_of(executor, rows, step)
    layout = batch.layout
    images = zip(layout.row_request, layout.is_conditional, strict=True)
    chosen = [(rows[owner].more[step], -1 if last else 0) for owner, last in images]
    parts = [torch.cat(own) for own in zip(*(_of_image(*one) for one in chosen), strict=True)]
    residuals = Residuals(tuple(parts[:-1]), parts[-1]) if adds else None
    return predict_batch(executor, rows, batch, residuals)


def _of_image(more: Sequence[Tensor], image: int) -> list[Tensor]:
    return [part[image] for part in more]


def test_residuals_reach_images_whose_matrices_have_rows_to_spare(
    small: Company, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = small.model.executor
    cuts = (None, None, None)
    with torch.inference_mode():
        rows = rows_of(small, cuts=cuts)
        alone = [predict(executor, [row], 0)[0] for row in rows]
        monkeypatch.setattr(executor, "_rounds", True)
        together = predict(executor, rows, 0)
        without = predict(executor, rows, 0, adds=False)
        encoded = executor.encode_half(batch_of(executor, rows, 0))
    assert len(encoded.skips[0]) > encoded.batch.layout.levels[0].num_tokens
    for found, expected, bare in zip(together, alone, without, strict=True):
        assert difference(found, expected) <= (2 * SCALE - 1) * CALL_TOLERANCE
        assert difference(bare, expected) >= CONTROL_FACTOR * CALL_TOLERANCE


@pytest.mark.parametrize("by_patch", [False, True])
def test_residuals_reach_the_rows_that_are_there(small: Company, by_patch: bool) -> None:
    executor: Any = small.model.executor
    with torch.inference_mode():
        alone = []
        for row in rows_of(small, by_patch=by_patch):
            predict(executor, [row], 0)
            alone.append(predict(executor, [row], 1)[0])
        rows = rows_of(small, by_patch=by_patch)
        predict(executor, rows, 0)
        together = predict(executor, rows, 1)
        without = predict(executor, rows, 1, adds=False)
    for found, expected, bare in zip(together, alone, without, strict=True):
        assert difference(found, expected) <= (2 * SCALE - 1) * CALL_TOLERANCE
        assert difference(bare, expected) >= CONTROL_FACTOR * CALL_TOLERANCE
