"""What ops on matrices of rows share: their blocks, their checks, the dtype they compute in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_COLUMNS = 128
"""Of a block; 128 halves are the 256 bytes that a warp reads at once and more."""

NUM_ELEMENTS = 4096
"""Of a block: 32 for each thread of four warps."""


class Tile(NamedTuple):
    """A block of a matrix; both sides are powers of two, as Triton wants them."""

    rows: int
    columns: int

    def grid(self, num_rows: int, num_columns: int) -> tuple[int, int]:
        """Return how many blocks cover a matrix, downwards and across."""
        return -(-num_rows // self.rows), -(-num_columns // self.columns)


def tile_for(num_columns: int, max_columns: int = MAX_COLUMNS) -> Tile:
    """Return the block for a matrix of so many columns."""
    columns = min(power_of_two(num_columns), max_columns)
    return Tile(max(NUM_ELEMENTS // columns, 1), columns)


def power_of_two(number: int) -> int:
    """Return the least power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def check_matrix(name: str, matrix: Tensor) -> None:
    """Refuse what is not a row-major matrix without gaps.

    Raises:
        ValueError: says the shape and strides that were given.
    """
    if matrix.ndim != 2 or not matrix.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous matrix of rows, given shape {tuple(matrix.shape)} with "
            f"strides {matrix.stride()}: call .contiguous() or .reshape() first"
        )


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a reference computes in: fp32, and fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
