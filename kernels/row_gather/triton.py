"""Rows packed by one kernel that copies bits, and writes zeros where no row is named."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ray_cluster.kernels.matrices import check_matrix, tile_for
from ray_cluster.kernels.row_gather.reference import as_index


def row_gather(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows that ``index`` names; arguments as the reference's."""
    check_matrix("x", x)
    index = as_index(index, len(x))
    num_rows, num_columns = len(index), x.shape[1]
    out = torch.empty((num_rows, num_columns), dtype=x.dtype, device=x.device)
    if out.numel():
        tile = tile_for(num_columns)
        _row_gather[tile.grid(num_rows, num_columns)](x, index, out, num_rows, num_columns, *tile)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _row_gather(
    x: tl.tensor,  # [N, C]
    index: tl.tensor,  # [M]
    out: tl.tensor,  # [M, C]
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    source = tl.load(index + row, mask=row < num_rows, other=-1).to(tl.int64)
    in_columns = (column < num_columns)[None, :]
    is_named = (source >= 0)[:, None] & in_columns
    value = tl.load(x + source[:, None] * num_columns + column[None, :], mask=is_named, other=0)
    mask = (row < num_rows)[:, None] & in_columns
    tl.store(out + row[:, None] * num_columns + column[None, :], value, mask=mask)
