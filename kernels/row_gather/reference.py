"""Rows of one matrix, packed into another, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ray_cluster.kernels.matrices import check_matrix


def row_gather(x: Tensor, index: Tensor) -> Tensor:
    """Return the rows that ``index`` names, in its order.

    Args:
        x: ``[N, C]``, contiguous, any dtype.
        index: ``[M]`` integers, -1 for a row of zeros; or ``[N]`` bool, the rows to take.

    Returns:
        ``[M, C]`` in the dtype of ``x``, bit for bit.

    Raises:
        ValueError: ``x`` is no contiguous matrix, or ``index`` no vector (or no mask of ``x``).
    """
    check_matrix("x", x)
    index = as_index(index, len(x))
    absent = (index < 0).nonzero().flatten()
    if not absent.numel():
        return x.index_select(0, index)
    if not x.shape[0]:
        return x.new_zeros(index.shape[0], x.shape[1])
    # filled rather than multiplied by zero: the row that stands in may hold NaN
    return x.index_select(0, index.clamp(min=0)).index_fill_(0, absent, 0)


def as_index(index: Tensor, num_rows: int) -> Tensor:
    """Return the row numbers of a mask, and row numbers as they are.

    A mask's number of rows is read on the host: on CUDA this waits for the device.
    """
    if index.ndim != 1 or index.dtype.is_floating_point:
        raise ValueError(
            f"index must be a vector of row numbers or a mask of rows, given {index.dtype} of "
            f"shape {tuple(index.shape)}"
        )
    if index.dtype != torch.bool:
        return index
    if len(index) != num_rows:
        raise ValueError(f"a mask has one entry per row: given {len(index)} for {num_rows} rows")
    return index.nonzero().flatten()
