"""Reuse of patches in UNets: convolutions and norms see the rest of the image as it was kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.step.state import Conditioning
from ray_cluster.engine.unet import halo, parts
from ray_cluster.policies.steps.reuse import ActivePatches
from tests.engine.conftest import Zoo
from tests.engine.harness import CALL_TOLERANCE, CONTROL_FACTOR, difference, request, start_all
from tests.engine.partial_unet import Control, expected_of_unet
from tests.engine.reusing import Company
from tests.engine.two_steps import SCALE, StepRow, call

Record = Callable[[str, object], None]
_GUIDED = 2 * SCALE - 1
# no multiple of a patch, and at some levels rounded up
SIZES = ((9, 13), (16, 16), (18, 20))


@pytest.fixture(params=("sd", "sdxl"))
def name(request: pytest.FixtureRequest) -> str:
    """A UNet of three levels, and one of two."""
    return str(request.param)


def some_patches(latents: Tensor, patch_size: int, seed: int | None) -> ActivePatches:
    """Two of five patches, drawn, and never all; all without a seed."""
    _, height, width = latents.shape
    count = -(-height // patch_size) * -(-width // patch_size)
    if seed is None:
        return ActivePatches(patch_size, (True,) * count)
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.4
    return ActivePatches(patch_size, (True, *drawn[1:-1].tolist(), False))


def rows_of(company: Company, *, is_all: bool = False) -> tuple[list[StepRow], list[Conditioning]]:
    """Of every size a guided row and a plain one by patch, and rows that are whole between them."""
    executor: Any = company.model.executor
    multiple, cuts = executor.patch_multiple, executor.num_outer
    generator = torch.Generator().manual_seed(0)
    rows, owned = [], []
    for index in range(4 * len(SIZES)):
        kind = index % 4
        one = request(f"r{index}", prompt="red " * index, guidance_scale=SCALE if kind < 2 else 1.0)
        [state] = start_all(company.model, [one])
        shape = (len(state.latents), *SIZES[index // 4])
        latents = [torch.randn(shape, generator=generator) for _ in range(2)]
        # an exact row of one size, and one of whole blocks of another
        cut = None if index == 5 else cuts[index % len(cuts)]
        row = StepRow(executor.prepare(state.conditioning), kind < 2, cut, latents)
        if index not in (5, 10):
            size = multiple * (1 + index % 2)
            row.active = some_patches(latents[0], size, None if is_all else index)
        rows.append(row)
        owned.append(state.conditioning)
    return rows, owned


def gaps(zoo: Zoo, company: Company, name: str, control: Control = "none") -> list[float]:
    """How far partial rows of a mixed step are from diffusers with kept pixels put in."""
    rows, owned = rows_of(company)
    call(company, rows, 0)
    found = []
    for row, own, prediction in zip(rows, owned, call(company, rows, 1), strict=True):
        if row.active is not None:
            image = prediction.unflatten(0, row.latents[0].shape[1:]).permute(2, 0, 1)
            expected = expected_of_unet(zoo.reference(name), row, own, control)
            found.append(difference(image, expected))
    return found


def test_a_mixed_partial_step_is_what_diffusers_makes_with_kept_pixels(
    zoo: Zoo, companies: Callable[[str], Company], name: str, record: Record
) -> None:
    found = gaps(zoo, companies(name), name)
    record("call", max(found))
    assert len(found) == 10
    assert max(found) <= _GUIDED * CALL_TOLERANCE


@pytest.mark.parametrize("control", ["nothing kept", "norms of active pixels"])
def test_nothing_kept_and_norms_of_active_pixels_would_show(
    zoo: Zoo, companies: Callable[[str], Company], name: str, control: Control, record: Record
) -> None:
    found = gaps(zoo, companies(name), name, control)
    record("control", min(found))
    assert min(found) >= CONTROL_FACTOR * CALL_TOLERANCE


def test_patches_with_nothing_around_them_would_show(
    zoo: Zoo,
    companies: Callable[[str], Company],
    name: str,
    record: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = halo.patch_table

    def without_halo(*arguments: Any) -> Any:
        found = table(*arguments)
        windows = torch.full_like(found.windows, -1)
        inner = (slice(None), slice(1, -1), slice(1, -1))
        windows[inner] = found.windows[inner]
        return replace(found, windows=windows)

    monkeypatch.setattr(halo, "patch_table", without_halo)
    found = gaps(zoo, companies(name), name)
    record("control", min(found))
    assert min(found) >= CONTROL_FACTOR * CALL_TOLERANCE


def test_with_all_patches_active_a_partial_step_is_a_full_one(
    companies: Callable[[str], Company], name: str, record: Record
) -> None:
    company = companies(name)
    rows, _ = rows_of(company, is_all=True)
    rows[10].cut = None
    call(company, rows, 0)
    found = call(company, rows, 1)
    for row in rows:
        row.cut = None
    worst = max(map(difference, found, call(company, rows, 1)))
    record("call", worst)
    assert worst <= _GUIDED * CALL_TOLERANCE


def test_every_row_of_a_mixed_step_is_as_if_alone(
    companies: Callable[[str], Company], name: str
) -> None:
    company = companies(name)
    rows, _ = rows_of(company)
    call(company, rows, 0)
    for row, prediction in zip(rows, call(company, rows, 1), strict=True):
        alone = replace(row, kept=None)
        call(company, [alone], 0)
        assert difference(call(company, [alone], 1)[0], prediction) <= _GUIDED * CALL_TOLERANCE


def test_only_active_pixels_are_computed_and_what_was_kept_stays(
    companies: Callable[[str], Company], monkeypatch: pytest.MonkeyPatch
) -> None:
    company, lengths = companies("sd"), []
    run = parts.FeedForward.__call__

    def counted(self: Any, pixels: Tensor, grid: Any) -> Tensor:
        lengths.append(len(pixels))
        return run(self, pixels, grid)

    monkeypatch.setattr(parts.FeedForward, "__call__", counted)
    row = replace(rows_of(company)[0][6], cut=1)
    assert row.active is not None
    is_active = tuple(index % 4 == 0 for index in range(len(row.active.is_active)))
    row.active = replace(row.active, is_active=is_active)
    call(company, [row], 0)
    whole = lengths.copy()
    lengths.clear()
    assert row.kept is not None
    before = [one.clone() for part in row.kept for one in (*part.made, *part.tokens)]
    call(company, [row], 1)
    assert lengths == [length // 4 for length in whole]
    after = [one for part in row.kept for one in (*part.made, *part.tokens)]
    assert all(map(torch.equal, before, after))
