"""Packed rows put back by one kernel that copies bits; rows that are not named are not touched."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ray_cluster.kernels.matrices import tile_for
from ray_cluster.kernels.row_gather.reference import as_index
from ray_cluster.kernels.row_scatter.reference import check_scatter


def row_scatter(base: Tensor, packed: Tensor, index: Tensor, *, in_place: bool = False) -> Tensor:
    """Return ``base`` with some rows replaced; arguments as the reference's."""
    index = as_index(index, len(base))
    check_scatter(base, packed, index)
    out = base if in_place else base.clone()
    num_rows, num_columns = packed.shape
    if packed.numel():
        tile = tile_for(num_columns)
        grid = tile.grid(num_rows, num_columns)
        _row_scatter[grid](packed, index, out, num_rows, num_columns, *tile)
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _row_scatter(
    packed: tl.tensor,  # [M, C]
    index: tl.tensor,  # [M]
    out: tl.tensor,  # [N, C]
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    goal = tl.load(index + row, mask=row < num_rows, other=-1).to(tl.int64)
    mask = (goal >= 0)[:, None] & (column < num_columns)[None, :]
    value = tl.load(packed + row[:, None] * num_columns + column[None, :], mask=mask)
    tl.store(out + goal[:, None] * num_columns + column[None, :], value, mask=mask)
