"""Which pixels the convolutions of active patches look at, and where what they make belongs.

At level ``l`` a patch has ``patch_size / 2**l`` pixels a side, the same patch at all levels: where
the sides of an image are no multiple of that, the last ones have less of them inside the image.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ray_cluster.policies.reuse import ActivePatches

_KEPT_TABLES = 512
_KERNEL = 3


class Size(NamedTuple):
    """Sides of an image at a level, in its pixels."""

    height: int
    width: int


@dataclass(frozen=True, slots=True)
class Reach:
    """What a convolution of three by three takes its pixels from.

    Attributes:
        stride: of the convolution.
        growth: how many times each pixel stands beside itself before it, along either side.
        before: pixels above, and to the left of, the first of a patch that it looks at.
    """

    stride: int = 1
    growth: int = 1
    before: int = 1


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """One image in a matrix of all pixels.

    Attributes:
        first: its first row.
        active: its active patches; None where it is whole.
    """

    size: Size
    first: int
    active: ActivePatches | None

    @property
    def num_pixels(self) -> int:
        """Its rows."""
        return self.size.height * self.size.width


@dataclass(frozen=True, slots=True)
class Piece:
    """What is convolved in one call.

    Attributes:
        size: of each whole image, or of each window.
        target: of what becomes of a whole image; None for windows.
        num_rows: pixels in all.
    """

    size: Size
    target: Size | None
    num_rows: int


@dataclass(frozen=True, slots=True)
class Plan:
    """How a matrix of all pixels is convolved where the computed ones are asked for.

    Attributes:
        source: which pixel each row of the pieces is, -1 for a row of zeros.
        pieces: of the rows, one after the other.
        order: which of the pieces' outputs is each computed pixel, in the order of these.
    """

    source: Tensor
    pieces: tuple[Piece, ...]
    order: Tensor


def plan_of(
    images: Sequence[PlacedImage], targets: Sequence[PlacedImage], number: int, reach: Reach
) -> Plan:
    """Return the plan for a ring: whole images of a size in one piece, patches of a size likewise.

    Args:
        images: where pixels are taken from, in the ring's order.
        targets: the same images where they go.
        number: of the level of the former.
    """
    alike: dict[Hashable, list[int]] = {}
    for index, image in enumerate(images):
        kind = image.size if image.active is None else image.active.patch_size
        alike.setdefault(kind, []).append(index)
    sources: list[Tensor] = []
    pieces: list[Piece] = []
    order: dict[int, Tensor] = {}
    num_outputs = 0
    for indices in alike.values():
        parts = [_part_of(images[index], targets[index], number, reach) for index in indices]
        for index, part in zip(indices, parts, strict=True):
            order[index] = part.placed + num_outputs
            num_outputs += part.num_outputs
        rows = torch.cat([part.windows for part in parts])
        is_whole = images[indices[0]].active is None
        target = targets[indices[0]].size if is_whole else None
        pieces.append(Piece(Size(*rows.shape[1:]), target, rows.numel()))
        sources.append(rows.flatten())
    ordered = torch.cat([order[index] for index in range(len(images))])
    return Plan(torch.cat(sources), tuple(pieces), ordered)


@dataclass(frozen=True, slots=True)
class PatchTable:
    """Where some windows of one image are convolved from and to.

    Attributes:
        windows: ``[P, h, w]``, which of the image's pixels each window has, -1 for what is outside
            of the image.
        placed: ``[n]``, where each computed pixel is among the outputs, in the order of the pixels;
            outputs outside of the image are no pixel's.
        num_outputs: of all windows.
    """

    windows: Tensor
    placed: Tensor
    num_outputs: int


def _part_of(image: PlacedImage, target: PlacedImage, number: int, reach: Reach) -> PatchTable:
    """Return the table of one image; a whole one is a window, whatever is done with it."""
    if image.active is None:
        whole = torch.arange(image.num_pixels).view(1, *image.size) + image.first
        return PatchTable(whole, torch.arange(target.num_pixels), target.num_pixels)
    side = image.active.patch_size >> number
    table = patch_table(image.active, image.size, target.size, side, reach)
    inside = table.windows >= 0
    windows = torch.where(inside, table.windows + image.first, table.windows)
    return PatchTable(windows, table.placed, table.num_outputs)


@lru_cache(maxsize=_KEPT_TABLES)
def patch_table(
    active: ActivePatches, source: Size, target: Size, side: int, reach: Reach
) -> PatchTable:
    """Return the table of an image's active patches; built once and kept.

    Args:
        source: the image where its pixels are taken from.
        target: the image where they go.
        side: of a patch in the source, in pixels.
    """
    grown = side * reach.growth
    goal = grown // reach.stride
    counts = [-(-end // goal) for end in target]
    # of what is grown beyond the target nothing is seen
    ends = source if reach.growth == 1 else target
    span = (goal - 1) * reach.stride + _KERNEL
    taken = [
        _axis(count, grown, span, end, reach.before) // reach.growth
        for count, end in zip(counts, ends, strict=True)
    ]
    made = [_axis(count, goal, goal, end) for count, end in zip(counts, target, strict=True)]
    windows = _squares(active, taken[0], taken[1], source.width)
    outputs = _squares(active, made[0], made[1], target.width).flatten()
    num_outside = int((outputs < 0).sum())
    return PatchTable(windows, outputs.argsort()[num_outside:], len(outputs))


def _axis(count: int, step: int, span: int, end: int, before: int = 0) -> Tensor:
    """Return along one side of an image where each window's places are, ``[count, span]``."""
    places = torch.arange(count)[:, None] * step - before + torch.arange(span)
    return places.masked_fill((places < 0) | (places >= end), -1)


def _squares(active: ActivePatches, rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """Return the pixels of active patches' windows, given their places along either side."""
    down, across = rows[:, None, :, None], columns[None, :, None, :]
    pixels = (down * width + across).masked_fill((down < 0) | (across < 0), -1)
    return pixels.flatten(0, 1)[torch.tensor(active.is_active)]
