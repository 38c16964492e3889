"""Group statistics in two kernels: moments per block of rows, then their merger per image.

A block of rows is cut where an image ends; each piece keeps its channels' mean and squared
deviations. Piece ``block + image`` is its number: from one piece to the next the block, the image
or both go on, so no two share one. Thus no size is needed on the host, and images of any sizes
are spread evenly over the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ray_cluster.kernels.matrices import Tile, power_of_two, tile_for
from ray_cluster.kernels.segment_stats.reference import GroupStats
from ray_cluster.kernels.segment_stats.spans import check_groups

_MAX_COLUMNS = 64
_MERGED_ELEMENTS = 2048


def segment_stats(x: Tensor, offsets: Tensor, num_groups: int, eps: float) -> GroupStats:
    """Return mean and reciprocal standard deviation; arguments as the reference's."""
    check_groups(x, offsets, num_groups)
    num_columns = x.shape[1]
    shape = (offsets.shape[0] - 1, num_groups)
    mean, rstd = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
    if not mean.numel():
        return GroupStats(mean, rstd)
    tile = tile_for(num_columns, _MAX_COLUMNS)
    means, squares = _pieces(x, offsets, tile)
    channels = power_of_two(num_columns // num_groups)
    _merge[shape](
        *(means, squares, offsets, mean, rstd, num_columns, num_columns // num_groups, eps),
        *(tile.rows, max(_MERGED_ELEMENTS // channels, 1), channels),
    )
    return GroupStats(mean, rstd)


def search_steps(num_images: int) -> int:
    """Return the steps that :func:`image_of` needs."""
    return max(num_images - 1, 0).bit_length()


def _pieces(x: Tensor, offsets: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return mean and squared deviations of every piece and channel; absent pieces unwritten."""
    (num_rows, num_columns), num_images = x.shape, offsets.shape[0] - 1
    grid = tile.grid(num_rows, num_columns)
    shape = (grid[0] + num_images, num_columns)
    means, squares = (torch.empty(shape, dtype=torch.float32, device=x.device) for _ in range(2))
    if num_rows:
        _piece_moments[grid](
            *(x, offsets, means, squares, num_rows, num_columns, num_images),
            *(search_steps(num_images), *tile),
        )
    return means, squares


@triton.jit
def image_of(
    offsets: tl.tensor, row: tl.tensor, num_images: tl.tensor, steps: tl.tensor
) -> tl.tensor:
    """Return the last image that begins at a row or before it; of many rows at once, or of one."""
    low = row * 0
    high = low + num_images - 1
    for _ in range(steps):
        middle = (low + high + 1) // 2
        begins_before = tl.load(offsets + middle).to(tl.int64) <= row
        low = tl.where(begins_before, middle, low)
        high = tl.where(begins_before, high, middle - 1)
    return low


@triton.jit(do_not_specialize=["num_rows", "num_images", "steps"])
def _piece_moments(
    x: tl.tensor,  # [N, C]
    offsets: tl.tensor,  # [images + 1]
    means: tl.tensor,  # [pieces, C]
    squares: tl.tensor,  # [pieces, C]
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_images: tl.tensor,
    steps: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    block = tl.program_id(0).to(tl.int64)
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < num_columns
    last_row = tl.minimum(block * ROWS + ROWS, num_rows) - 1
    first = image_of(offsets, block * ROWS, num_images, steps)
    last = image_of(offsets, last_row, num_images, steps)
    for image in range(first, last + 1):
        begin = tl.load(offsets + image).to(tl.int64)
        end = tl.load(offsets + image + 1).to(tl.int64)
        in_image = (row >= begin) & (row < end)
        mask = in_image[:, None] & in_columns[None, :]
        count = tl.maximum(tl.sum(in_image.to(tl.float32), 0), 1.0)
        value = tl.load(x + row[:, None] * num_columns + column[None, :], mask=mask, other=0.0)
        value = value.to(tl.float32)
        mean = tl.sum(value, 0) / count
        # a sum of values far from zero is coarse, one of their distances is not
        mean += tl.sum(tl.where(mask, value - mean[None, :], 0.0), 0) / count
        apart = tl.where(mask, value - mean[None, :], 0.0)
        piece = (block + image) * num_columns + column
        tl.store(means + piece, mean, mask=in_columns)
        tl.store(squares + piece, tl.sum(apart * apart, 0), mask=in_columns)


@triton.jit
def _merge(
    means: tl.tensor,  # [pieces, C]
    squares: tl.tensor,  # [pieces, C]
    offsets: tl.tensor,  # [images + 1]
    mean_out: tl.tensor,  # [images, G]
    rstd_out: tl.tensor,  # [images, G]
    num_columns: tl.tensor,
    per_group: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    PIECES: tl.constexpr,
    CHANNELS: tl.constexpr,
) -> None:
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    begin = tl.load(offsets + image).to(tl.int64)
    end = tl.load(offsets + image + 1).to(tl.int64)
    first = begin // ROWS
    num_pieces = tl.where(end > begin, (end - 1) // ROWS - first + 1, 0)
    lane = tl.arange(0, PIECES)
    channel = tl.arange(0, CHANNELS)
    in_group = (channel < per_group)[None, :]
    num_values = tl.maximum((end - begin).to(tl.float32) * per_group, 1.0)

    # summed as distances from one of them: of means far from zero the sum would be coarse
    one = (first + image) * num_columns + group * per_group
    near = tl.load(means + one, mask=num_pieces > 0, other=0.0)
    total = tl.zeros([PIECES, CHANNELS], dtype=tl.float32)
    for done in range(0, num_pieces, PIECES):
        block = first + done + lane
        mask = (done + lane < num_pieces)[:, None] & in_group
        rows = tl.minimum(end, (block + 1) * ROWS) - tl.maximum(begin, block * ROWS)
        where = (block + image)[:, None] * num_columns + group * per_group + channel[None, :]
        apart = tl.where(mask, tl.load(means + where, mask=mask, other=0.0) - near, 0.0)
        total += rows.to(tl.float32)[:, None] * apart
    mean = near + tl.sum(tl.sum(total, 1), 0) / num_values

    total = tl.zeros([PIECES, CHANNELS], dtype=tl.float32)
    for done in range(0, num_pieces, PIECES):
        block = first + done + lane
        mask = (done + lane < num_pieces)[:, None] & in_group
        rows = tl.minimum(end, (block + 1) * ROWS) - tl.maximum(begin, block * ROWS)
        where = (block + image)[:, None] * num_columns + group * per_group + channel[None, :]
        apart = tl.where(mask, tl.load(means + where, mask=mask, other=0.0) - mean, 0.0)
        total += rows.to(tl.float32)[:, None] * apart * apart
        total += tl.load(squares + where, mask=mask, other=0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(tl.sum(total, 1), 0) / num_values + eps)
    tl.store(mean_out + image * tl.num_programs(1) + group, mean)
    tl.store(rstd_out + image * tl.num_programs(1) + group, rstd)
