"""The gated GELU as one pass over the rows: two halves are read, the first is overwritten."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ray_cluster.kernels.geglu.reference import check_halves
from ray_cluster.kernels.matrices import tile_for


def geglu(x: Tensor) -> Tensor:
    """Put ``hidden * gelu(gate)`` where hidden was; as the reference's, computed in fp32."""
    check_halves(x)
    num_rows, num_columns = x.shape[0], x.shape[1] // 2
    if x.numel():
        tile = tile_for(num_columns)
        _geglu[tile.grid(num_rows, num_columns)](x, num_rows, num_columns, *tile)
    return x[:, :num_columns]


@triton.jit(do_not_specialize=["num_rows"])
def _geglu(
    x: tl.tensor,  # [N, 2C]
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    # rows are int64: a matrix may have more than 2^31 elements
    begin = x + row[:, None] * (2 * num_columns) + column[None, :]
    hidden = tl.load(begin, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(begin + num_columns, mask=mask, other=0.0).to(tl.float32)
    gelu = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(begin, (hidden * gelu).to(x.dtype.element_ty), mask=mask)
