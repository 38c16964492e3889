"""One sampler step for a whole batch in one pass: every tensor is read or written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ray_cluster.kernels.matrices import tile_for
from ray_cluster.kernels.sampler_update.reference import check_update

_MAX_COLUMNS = 1024


def sampler_update(
    latents: Tensor,
    output: Tensor,
    previous: Tensor,
    noise: Tensor | None,
    coefficients: Tensor,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advance every row by its own sampler step; arguments as the reference's, fp32 inside."""
    check_update(latents, (output, previous, noise), coefficients, rows)
    inputs = [
        None if one is None else one.contiguous() for one in (latents, output, previous, noise)
    ]
    advanced, denoised = (
        torch.empty(latents.shape, dtype=latents.dtype, device=latents.device) for _ in range(2)
    )
    if latents.numel():
        num_rows, num_columns = len(latents), latents.numel() // len(latents)
        tile = tile_for(num_columns, _MAX_COLUMNS)
        _sampler_update[tile.grid(num_rows, num_columns)](
            *(*inputs, coefficients.contiguous(), rows, advanced, denoised),
            *(num_rows, num_columns, noise is not None, rows is not None, *tile),
        )
    return advanced, denoised


@triton.jit(do_not_specialize=["num_rows"])
def _sampler_update(
    latents: tl.tensor,  # [M, C]
    outputs: tl.tensor,  # [M, C]
    previous: tl.tensor,  # [M, C]
    noises: tl.tensor,  # [M, C] or None
    coefficients: tl.tensor,  # [B, 8]
    rows: tl.tensor,  # [M] or None
    advanced_out: tl.tensor,  # [M, C]
    denoised_out: tl.tensor,  # [M, C]
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    HAS_NOISE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < num_rows
    mask = in_rows[:, None] & (column < num_columns)[None, :]
    owner = row
    if HAS_ROWS:
        owner = tl.load(rows + row, mask=in_rows, other=0).to(tl.int64)
    # in the order of the reference's constants; [ROWS, 1] each
    mine = coefficients + owner * 8
    from_latents = tl.load(mine, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    from_output = tl.load(mine + 1, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    keep = tl.load(mine + 2, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    direct = tl.load(mine + 3, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    toward = tl.load(mine + 4, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    history = tl.load(mine + 5, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    clip = tl.load(mine + 7, mask=in_rows, other=0.0).to(tl.float32)[:, None]

    where = row[:, None] * num_columns + column[None, :]
    x = tl.load(latents + where, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(outputs + where, mask=mask, other=0.0).to(tl.float32)
    before = tl.load(previous + where, mask=mask, other=0.0).to(tl.float32)
    denoised = from_latents * x + from_output * m
    # not minimum and maximum: a NaN must stay one, by it a failed row is known
    denoised = tl.where(denoised > clip, clip, denoised)
    denoised = tl.where(denoised < -clip, -clip, denoised)
    advanced = keep * x + toward * denoised + direct * m + history * before
    if HAS_NOISE:
        share = tl.load(mine + 6, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        advanced += share * tl.load(noises + where, mask=mask, other=0.0).to(tl.float32)
    tl.store(advanced_out + where, advanced.to(advanced_out.dtype.element_ty), mask=mask)
    tl.store(denoised_out + where, denoised.to(denoised_out.dtype.element_ty), mask=mask)
