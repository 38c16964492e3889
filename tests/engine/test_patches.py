"""Reuse of patches: what is computed of a row is as if all other tokens were as they were kept.

What a partial step of a UNet computes is in ``test_unet_patches.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_cluster.engine.dit.blocks import JointBlock
from ray_cluster.engine.step.active import active_tokens
from ray_cluster.engine.step.executor import RowReuse
from ray_cluster.engine.step.state import Conditioning
from ray_cluster.policies.steps.reuse import ActivePatches
from tests.engine.conftest import Zoo
from tests.engine.harness import (
    CALL_TOLERANCE,
    CONTROL_FACTOR,
    difference,
    request,
    start_all,
)
from tests.engine.partial_reference import expected
from tests.engine.reusing import Company
from tests.engine.two_steps import SCALE, StepRow, call

Record = Callable[[str, object], None]
PATCH = 4
# a guided prediction has the errors of its two rows so many times
_GUIDED = 2 * SCALE - 1


@pytest.fixture(params=("sd3", "sd35", "flux"))
def name(request: pytest.FixtureRequest) -> str:
    """Each kind of transformer in turn."""
    return str(request.param)


def patches_of(latents: Tensor, every: int, *, has_prompt: bool) -> ActivePatches:
    """Every so manieth patch of an image."""
    _, height, width = latents.shape
    count = -(-height // PATCH) * -(-width // PATCH)
    return ActivePatches(PATCH, tuple(i % every == 0 for i in range(count)), has_prompt)


def rows_of(company: Company) -> tuple[list[StepRow], list[Conditioning]]:
    """Rows of two sizes, cut at different depths, an exact one and one of whole blocks too."""
    executor: Any = company.model.executor
    is_flux = company.model.profile.guidance != "rows"
    sampler = company.model.profile.default_sampler
    some = []
    for index in range(6):
        size = {} if index < 4 else {"width_px": 96}
        # guided rows of a size come first
        guided = {"guidance_scale": SCALE if index < 2 or index == 4 or is_flux else 1.0}
        prompt = "a blue square " * (index + 1)
        some.append(request(f"r{index}", sampler=sampler, prompt=prompt, **size, **guided))
    generator = torch.Generator().manual_seed(0)
    rows, owned = [], []
    for index, state in enumerate(start_all(company.model, some)):
        first = torch.randn(state.latents.shape, generator=generator)
        second = torch.randn(first.shape, generator=generator)
        own = state.conditioning
        cut = (0, executor.num_outer[-1], None, 0, 1, 0)[index]
        row = StepRow(executor.prepare(own), own.is_guided, cut, [first, second])
        if index not in (2, 3):
            row.active = patches_of(first, 2 + index % 2, has_prompt=index == 4)
        rows.append(row)
        owned.append(own)
    return rows, owned


def test_a_mixed_partial_step_is_what_diffusers_makes_with_kept_tokens(
    zoo: Zoo, companies: Callable[[str], Company], name: str, record: Record
) -> None:
    company, reference = companies(name), zoo.reference(name)
    rows, owned = rows_of(company)
    call(company, rows, 0)
    found = call(company, rows, 1)
    shrink = company.model.executor.patch_multiple
    assert shrink is not None
    gaps, controls = [], []
    for row, own, prediction in zip(rows, owned, found, strict=True):
        if row.active is None:
            continue
        _, height, width = row.latents[0].shape
        tokens = active_tokens(row.active, height // shrink, width // shrink, shrink)
        mask = torch.zeros(height * width // shrink**2, dtype=torch.bool)
        mask[tokens] = True
        image = prediction.unflatten(0, (height, width)).permute(2, 0, 1)
        gaps.append(difference(image, expected(reference, row, own, mask)))
        blind = expected(reference, row, own, mask, sees_kept=False)
        controls.append(difference(image, blind))
    record("call", max(gaps))
    record("control", min(controls))
    assert max(gaps) <= _GUIDED * CALL_TOLERANCE
    assert min(controls) >= CONTROL_FACTOR * CALL_TOLERANCE


def test_every_row_of_a_mixed_step_is_as_if_alone_and_exact_ones_are_exact(
    companies: Callable[[str], Company], name: str
) -> None:
    company = companies(name)
    rows, _ = rows_of(company)
    call(company, rows, 0)
    found = call(company, rows, 1)
    for index, prediction in enumerate(found):
        row = replace(rows[index], kept=None)
        call(company, [row], 0)
        assert difference(call(company, [row], 1)[0], prediction) <= _GUIDED * CALL_TOLERANCE
    exact = replace(rows[2], kept=None)
    assert difference(call(company, [exact], 1)[0], found[2]) <= _GUIDED * CALL_TOLERANCE


def test_with_all_patches_active_a_partial_step_is_a_full_one(
    companies: Callable[[str], Company], name: str
) -> None:
    company = companies(name)
    rows, _ = rows_of(company)
    for row in rows:
        row.cut, row.active = 0, patches_of(row.latents[0], 1, has_prompt=True)
    call(company, rows, 0)
    found = call(company, rows, 1)
    for row in rows:
        row.cut = None
    for one, other in zip(found, call(company, rows, 1), strict=True):
        assert difference(one, other) <= _GUIDED * CALL_TOLERANCE


def test_only_active_tokens_are_computed_and_nothing_runs_for_none(
    companies: Callable[[str], Company], monkeypatch: pytest.MonkeyPatch
) -> None:
    company, sizes = companies("sd35"), []
    run = JointBlock.__call__

    def counted(*arguments: Any) -> Any:
        sizes.append((len(arguments[1]), len(arguments[2])))
        return run(*arguments)

    monkeypatch.setattr(JointBlock, "__call__", counted)
    [row, *_], _ = rows_of(company)
    call(company, [row], 0)
    (num_tokens, num_prompt), num_blocks = sizes[0], len(sizes)
    sizes.clear()
    call(company, [row], 1)
    assert sizes == [(num_tokens // 2, 0)] * num_blocks
    sizes.clear()
    assert row.active is not None
    row.active = replace(row.active, is_active=(False,) * len(row.active.is_active))
    nothing = call(company, [row], 1)[0]
    assert sizes == []
    # which is reuse of the whole block
    row.active = None
    assert difference(call(company, [row], 1)[0], nothing) == 0
    assert num_prompt > 0


def test_patches_of_another_size_of_image_are_refused(
    companies: Callable[[str], Company],
) -> None:
    [row, *_], _ = rows_of(companies("sd3"))
    call(companies("sd3"), [row], 0)
    row.active = ActivePatches(PATCH, (True,))
    with pytest.raises(ValueError, match="patches, given 1"):
        call(companies("sd3"), [row], 1)


def test_whole_blocks_keep_nothing_of_tokens(companies: Callable[[str], Company]) -> None:
    """What only patches need takes no memory where they are not asked for."""
    company = companies("sd3")
    executor: Any = company.model.executor
    [row, *_], _ = rows_of(company)
    row.active = None
    call(company, [row], 0)
    assert row.kept is not None
    assert all(not kept.tokens for kept in row.kept)
    part = RowReuse(0)
    assert not part.is_by_patch
    assert executor.patch_multiple == 2
