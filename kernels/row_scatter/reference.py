"""Packed rows, put back to where they belong, in torch."""

from __future__ import annotations

from torch import Tensor

from ray_cluster.kernels.matrices import check_matrix
from ray_cluster.kernels.row_gather.reference import as_index


def row_scatter(base: Tensor, packed: Tensor, index: Tensor, *, in_place: bool = False) -> Tensor:
    """Return ``base`` with the rows that ``index`` names replaced.

    Args:
        base: ``[N, C]``, contiguous, any dtype.
        packed: ``[M, C]``, contiguous, of the same dtype.
        index: ``[M]`` integers, the row of ``base`` that each packed row replaces, -1 for none;
            a row may be named once. Or ``[N]`` bool with M entries set.
        in_place: whether ``base`` itself is changed; else it stays as it is.

    Returns:
        ``[N, C]``: ``base`` itself, or a new matrix.

    Raises:
        ValueError: the shapes, dtypes or strides do not fit.
    """
    index = as_index(index, len(base))
    check_scatter(base, packed, index)
    is_named = index >= 0
    out = base if in_place else base.clone()
    if is_named.all():
        return out.index_copy_(0, index.long(), packed)
    return out.index_copy_(0, index[is_named].long(), packed[is_named])


def check_scatter(base: Tensor, packed: Tensor, index: Tensor) -> None:
    """Refuse packed rows that do not fit to the base, or not to the row numbers."""
    check_matrix("base", base)
    check_matrix("packed", packed)
    if packed.shape != (len(index), base.shape[1]) or packed.dtype != base.dtype:
        raise ValueError(
            f"packed must be {base.dtype} of shape {(len(index), base.shape[1])}, one row per "
            f"entry of index, given {packed.dtype} of shape {tuple(packed.shape)}"
        )
