"""Low-rank products as one kernel: a block of a group's rows is shrunk once, then expanded."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ray_cluster.kernels.grouped_low_rank.reference import RowGroups, check_low_rank
from ray_cluster.kernels.matrices import power_of_two

# tensor cores want 16 of everything
_LEAST = 16
_ROWS, _COLUMNS = 64, 64


def grouped_low_rank(
    outputs: Tensor, inputs: Tensor, shrink: Tensor, expand: Tensor, groups: RowGroups
) -> Tensor:
    """Add the products in place; as the reference's, summed in fp32."""
    check_low_rank(outputs, inputs, shrink, expand, groups)
    count, rank, num_inputs = shrink.shape
    if count and rank and groups.length:
        rows = min(_ROWS, max(_LEAST, power_of_two(groups.length)))
        # programs of one wave share a group's factors in the cache
        grid = (triton.cdiv(groups.length, rows), count)
        _grouped_low_rank[grid](
            *(outputs, inputs, shrink.contiguous(), expand.contiguous()),
            *(*groups, num_inputs, outputs.shape[1], rank),
            *(outputs.stride(0), inputs.stride(0)),
            *(rows, max(_LEAST, power_of_two(rank)), _COLUMNS),
        )
    return outputs


@triton.jit(do_not_specialize=["first", "length", "step"])
def _grouped_low_rank(
    outputs: tl.tensor,  # [N, D]
    inputs: tl.tensor,  # [N, C]
    shrink: tl.tensor,  # [G, r, C]
    expand: tl.tensor,  # [G, r, D]
    first: tl.tensor,
    length: tl.tensor,
    step: tl.tensor,
    num_inputs: tl.tensor,
    num_outputs: tl.tensor,
    num_ranks: tl.tensor,
    output_stride: tl.tensor,
    input_stride: tl.tensor,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    group = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # rows are int64: a matrix may have more than 2^31 elements
    row = first + group * step + own
    rank = tl.arange(0, RANKS)
    is_row, is_rank = own < length, rank < num_ranks
    factor = group * num_ranks + rank
    shrunk = tl.zeros((ROWS, RANKS), dtype=tl.float32)
    for begin in range(0, num_inputs, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < num_inputs
        x = tl.load(
            inputs + row[:, None] * input_stride + column[None, :],
            mask=is_row[:, None] & inside[None, :],
            other=0.0,
        )
        a = tl.load(
            shrink + factor[None, :] * num_inputs + column[:, None],
            mask=is_rank[None, :] & inside[:, None],
            other=0.0,
        )
        shrunk = tl.dot(x, a, shrunk, input_precision="ieee")
    # rounded, as what a layer hands on is
    rounded = shrunk.to(outputs.dtype.element_ty)
    for begin in range(0, num_outputs, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = column < num_outputs
        b = tl.load(
            expand + factor[:, None] * num_outputs + column[None, :],
            mask=is_rank[:, None] & inside[None, :],
            other=0.0,
        )
        mask = is_row[:, None] & inside[None, :]
        goal = outputs + row[:, None] * output_stride + column[None, :]
        before = tl.load(goal, mask=mask, other=0.0).to(tl.float32)
        after = tl.dot(rounded, b, before, input_precision="ieee")
        tl.store(goal, after.to(outputs.dtype.element_ty), mask=mask)
