"""The gated GELU of a transformer's feed-forward layer, in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ray_cluster.kernels.matrices import check_matrix


def geglu(x: Tensor) -> Tensor:
    """Multiply the first half of every row by the exact GELU of the second, in place.

    What diffusers' ``GEGLU`` module does after its projection, without memory for the result.

    Args:
        x: ``[N, 2C]``, hidden and gate beside each other; contiguous. Hidden is overwritten.

    Returns:
        ``[N, C]``, the first half of ``x``: its rows are as far apart as those of ``x``.

    Raises:
        ValueError: ``x`` is no contiguous matrix, or its number of columns is odd.
    """
    check_halves(x)
    hidden, gate = x.chunk(2, dim=-1)
    return hidden.mul_(F.gelu(gate))


def check_halves(x: Tensor) -> None:
    """Refuse a matrix without two equal halves."""
    check_matrix("x", x)
    if x.shape[1] % 2:
        raise ValueError(f"x must have an even number of columns, given {x.shape[1]}")
