"""Low-rank products of groups of rows, each with factors of its own, in torch.

Batched LoRA products as in Punica (Chen et al., 2024, section 4), for groups of consecutive rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowGroups(NamedTuple):
    """Groups of as many consecutive rows each, as far apart each.

    Attributes:
        first: row of the first group.
        length: rows of each group.
        step: from the first row of a group to that of the next one.
    """

    first: int
    length: int
    step: int

    def of(self, matrix: Tensor, count: int) -> Tensor:
        """Return so many groups of ``[N, C]`` as ``[count, length, C]``, a view."""
        stride = matrix.stride(0)
        return matrix.as_strided(
            (count, self.length, matrix.shape[1]),
            (self.step * stride, stride, 1),
            matrix.storage_offset() + self.first * stride,
        )


def grouped_low_rank(
    outputs: Tensor, inputs: Tensor, shrink: Tensor, expand: Tensor, groups: RowGroups
) -> Tensor:
    """Add to the rows of each group the low-rank product of its inputs, in place.

    Args:
        outputs: ``[N, D]``; its rows may be further apart than D, as those of some columns are.
        inputs: ``[N, C]``, likewise, of the same dtype.
        shrink: ``[G, r, C]``, of each group; fewer ranks are filled up with zeros.
        expand: ``[G, r, D]``, likewise.
        groups: which rows they are.

    Returns:
        ``outputs``.

    Raises:
        ValueError: the shapes, dtypes or strides do not fit, or the groups overlap.
    """
    check_low_rank(outputs, inputs, shrink, expand, groups)
    count = shrink.shape[0]
    if count == 1:
        rows = slice(groups.first, groups.first + groups.length)
        outputs[rows].addmm_(inputs[rows] @ shrink[0].t(), expand[0])
    elif count and groups.length:
        # transposed as the factors are: with few ranks MKL is up to five times faster so
        shrunk = torch.bmm(groups.of(inputs, count), shrink.transpose(1, 2))
        groups.of(outputs, count).baddbmm_(shrunk, expand)
    return outputs


def check_low_rank(
    outputs: Tensor, inputs: Tensor, shrink: Tensor, expand: Tensor, groups: RowGroups
) -> None:
    """Refuse matrices and factors that do not fit to each other, or groups beyond them."""
    count, rank, num_inputs = shrink.shape
    num_rows, num_outputs = outputs.shape
    if inputs.shape != (num_rows, num_inputs) or expand.shape != (count, rank, num_outputs):
        raise ValueError(
            f"outputs [N, D], inputs [N, C], shrink [G, r, C] and expand [G, r, D] are needed, "
            f"given {[tuple(one.shape) for one in (outputs, inputs, shrink, expand)]}"
        )
    if not outputs.dtype == inputs.dtype == shrink.dtype == expand.dtype:
        raise ValueError("outputs, inputs and factors must be of one dtype: convert the factors")
    if (outputs.stride(1) != 1 and num_outputs > 1) or (inputs.stride(1) != 1 and num_inputs > 1):
        raise ValueError("the columns of outputs and of inputs must be beside each other")
    last = groups.first + (count - 1) * groups.step + groups.length
    if (
        groups.first < 0
        or (count and last > num_rows)
        or (count > 1 and groups.step < groups.length)
    ):
        raise ValueError(f"{count} of {groups} overlap or are not all in {num_rows} rows")
