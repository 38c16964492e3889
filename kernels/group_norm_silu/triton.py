"""Group normalisation as statistics, then one pass that normalises and applies SiLU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ray_cluster.kernels.group_norm_silu.reference import check_norm
from ray_cluster.kernels.matrices import tile_for
from ray_cluster.kernels.segment_stats.triton import image_of, search_steps, segment_stats


def group_norm_silu(
    x: Tensor,
    offsets: Tensor,
    num_groups: int,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    silu: bool,
) -> Tensor:
    """Normalise each image, scale, shift, apply SiLU; arguments as the reference's."""
    check_norm(x, offsets, num_groups, weight, bias)
    mean, rstd = segment_stats(x, offsets, num_groups, eps)
    num_rows, num_columns = x.shape
    out = torch.empty_like(x)
    if out.numel():
        tile = tile_for(num_columns)
        num_images = offsets.shape[0] - 1
        _normalise[tile.grid(num_rows, num_columns)](
            *(x, offsets, mean, rstd, weight, bias, out),
            *(num_rows, num_columns, num_images, search_steps(num_images)),
            *(num_groups, num_columns // num_groups, silu, *tile),
        )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_images", "steps"])
def _normalise(
    x: tl.tensor,  # [N, C]
    offsets: tl.tensor,  # [images + 1]
    means: tl.tensor,  # [images, G]
    rstds: tl.tensor,  # [images, G]
    weights: tl.tensor,  # [C]
    biases: tl.tensor,  # [C]
    out: tl.tensor,  # [N, C]
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_images: tl.tensor,
    steps: tl.tensor,
    num_groups: tl.tensor,
    per_group: tl.tensor,
    IS_SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < num_rows
    in_columns = column < num_columns
    mask = in_rows[:, None] & in_columns[None, :]
    at = row[:, None] * num_columns + column[None, :]

    image = image_of(offsets, row, num_images, steps)
    stat = image[:, None] * num_groups + (column // per_group)[None, :]
    mean = tl.load(means + stat, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.load(rstds + stat, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weights + column, mask=in_columns, other=0.0).to(tl.float32)
    bias = tl.load(biases + column, mask=in_columns, other=0.0).to(tl.float32)
    value = tl.load(x + at, mask=mask, other=0.0)

    normed = (value.to(tl.float32) - mean) * rstd * weight[None, :] + bias[None, :]
    if IS_SILU:
        normed = normed * tl.sigmoid(normed)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=mask)
