"""Matrices of several sizes have rows to spare on CPUs; what is in those reaches no image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.engine.unet.grids import Grid, rounded_rows
from tests.engine.conftest import Zoo
from tests.engine.harness import CALL_TOLERANCE, difference, request, start_all
from tests.engine.two_steps import SCALE, StepRow, batch_of, predict_batch

# in the order of their layout
_SIZES_PX = ((64, 64), (64, 104), (128, 64), (96, 96))


@given(st.integers(1, 10**7))
def test_the_next_of_few_numbers_is_at_most_an_eighth_away(count: int) -> None:
    rows = rounded_rows(count)
    assert count <= rows <= 1.125 * count
    assert rounded_rows(rows) == rows


def test_there_are_eight_numbers_between_a_power_of_two_and_the_next() -> None:
    assert len({rounded_rows(count) for count in range(1025, 2049)}) == 8


def rows_of(model: LoadedModel) -> list[StepRow]:
    """One row of each size, guided and not."""
    requests = [
        request(f"r{i}", width_px=width, height_px=height, seed=i, guidance_scale=1.0 + i % 2)
        for i, (height, width) in enumerate(_SIZES_PX)
    ]
    found = []
    for state in start_all(model, requests):
        owned = state.conditioning
        latents = [torch.randn(state.latents.shape)]
        found.append(StepRow(model.executor.prepare(owned), owned.is_guided, None, latents))
    return found


def stacked_with_rubbish(self: Grid, parts: Sequence[Tensor]) -> Tensor:
    """Fill the rows to spare with what would be seen in any image it reached."""
    spare = parts[0].new_full((self._num_spare, parts[0].shape[1]), torch.nan)
    return torch.cat([*parts, spare])


@pytest.mark.parametrize("family", ["shapes", "sd", "sdxl"])
def test_rows_to_spare_reach_no_image(
    zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.model(family)
    executor: Any = model.executor
    with torch.inference_mode():
        rows = rows_of(model)
    monkeypatch.setattr(executor._encoder, "_rounds", False)
    expected = predict_batch(executor, rows, batch_of(executor, rows, 0))
    monkeypatch.setattr(executor._encoder, "_rounds", True)
    monkeypatch.setattr(Grid, "stacked", stacked_with_rubbish)
    batch = batch_of(executor, rows, 0)
    with torch.inference_mode():
        num_rows = len(executor.encode_half(batch).skips[0])
    assert num_rows == rounded_rows(num_rows) > batch.layout.levels[0].num_tokens
    for found, one in zip(predict_batch(executor, rows, batch), expected, strict=True):
        assert difference(found, one) <= (2 * SCALE - 1) * CALL_TOLERANCE
