"""The gated GELU of a transformer's feed-forward layer, in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ray_cluster.kernels.matrices import check_matrix


def geglu(x: Tensor) -> Tensor:
    """Return the first half of every row, times the exact GELU of the second.

    What diffusers' ``GEGLU`` module does after its projection.

    Args:
        x: ``[N, 2C]``, hidden and gate beside each other; contiguous.

    Returns:
        ``[N, C]`` in the dtype of ``x``.

    Raises:
        ValueError: ``x`` is no contiguous matrix, or its number of columns is odd.
    """
    check_halves(x)
    hidden, gate = x.chunk(2, dim=-1)
    return F.gelu(gate).mul_(hidden)


def check_halves(x: Tensor) -> None:
    """Refuse a matrix without two equal halves."""
    check_matrix("x", x)
    if x.shape[1] % 2:
        raise ValueError(f"x must have an even number of columns, given {x.shape[1]}")
