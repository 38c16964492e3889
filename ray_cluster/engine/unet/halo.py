"""Which pixels the convolutions of active patches look at, and where what they make belongs.

At level ``l`` a patch has ``patch_size / 2**l`` pixels a side, the same patch at all levels: where
the sides of an image are no multiple of that, the last ones have less of them inside the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ray_cluster.policies.steps.reuse import ActivePatches

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
class HaloPlan:
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
) -> HaloPlan:
    """Return the plan for a ring: whole images of a size in one piece, patches of a side likewise.

    Args:
        images: where pixels are taken from, in the ring's order.
        targets: the same images where they go.
        number: of the level of the former.
    """
    alike: dict[tuple[Size, int | None], list[int]] = {}
    for index, image in enumerate(images):
        side = None if image.active is None else image.active.patch_size >> number
        alike.setdefault((image.size, side), []).append(index)
    # by what is convolved in one call
    sources: dict[tuple[Size, Size | None], list[Tensor]] = {}
    goals: dict[tuple[Size, Size | None], list[Tensor]] = {}
    for (size, side), indices in alike.items():
        some, theirs = [images[index] for index in indices], [targets[index] for index in indices]
        target = theirs[0].size
        if side is None:
            kind: tuple[Size, Size | None] = (size, target)
            windows, pixels = _whole(some), _whole(theirs)
        else:
            table = patch_table(size, target, side, reach)
            windows = _active(some, some, table.windows)
            pixels = _active(some, theirs, table.pixels)
            kind = (Size(*windows.shape[1:]), None)
        sources.setdefault(kind, []).append(windows.flatten())
        goals.setdefault(kind, []).append(pixels.flatten())
    rows = {kind: torch.cat(parts) for kind, parts in sources.items()}
    made = torch.cat([part for parts in goals.values() for part in parts])
    return HaloPlan(
        source=torch.cat(list(rows.values())),
        pieces=tuple(Piece(*kind, len(own)) for kind, own in rows.items()),
        order=made.argsort()[int((made < 0).sum()) :],
    )


def _whole(images: Sequence[PlacedImage]) -> Tensor:
    """Return the rows of images of one size, ``[n, pixels]``."""
    firsts = torch.tensor([image.first for image in images])
    return torch.arange(images[0].num_pixels) + firsts[:, None]


def _active(
    images: Sequence[PlacedImage], placed: Sequence[PlacedImage], windows: Tensor
) -> Tensor:
    """Return the rows that the windows of active patches have, image by image, ``[P, h, w]``.

    Args:
        images: which patches are active; of one size.
        placed: the images whose rows are meant.
        windows: of every patch, the pixels of an image.
    """
    is_active = [image.active.is_active for image in images if image.active is not None]
    owner, patch = torch.tensor(is_active).nonzero().unbind(1)
    firsts = torch.tensor([image.first for image in placed])[owner]
    found = windows[patch]
    return torch.where(found < 0, found, found + firsts[:, None, None])


@dataclass(frozen=True, slots=True)
class PatchTable:
    """Where the patches of an image are convolved from and to, all of them, row by row.

    Attributes:
        windows: ``[patches, s, s]``, which of the image's pixels each one's window has; -1 for what
            is outside of the image.
        pixels: ``[patches, t, t]``, which pixels come of it, likewise.
    """

    windows: Tensor
    pixels: Tensor


@lru_cache(maxsize=_KEPT_TABLES)
def patch_table(source: Size, target: Size, side: int, reach: Reach) -> PatchTable:
    """Return the table of an image; built once and kept.

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
    windows = _squares(
        *(
            _axis(count, grown, span, end, reach.before) // reach.growth
            for count, end in zip(counts, ends, strict=True)
        ),
        width=source.width,
    )
    pixels = _squares(
        *(_axis(count, goal, goal, end) for count, end in zip(counts, target, strict=True)),
        width=target.width,
    )
    return PatchTable(windows, pixels)


def _axis(count: int, step: int, span: int, end: int, before: int = 0) -> Tensor:
    """Return along one side of an image where each window's places are, ``[count, span]``."""
    places = torch.arange(count)[:, None] * step - before + torch.arange(span)
    return places.masked_fill((places < 0) | (places >= end), -1)


def _squares(rows: Tensor, columns: Tensor, *, width: int) -> Tensor:
    """Return the pixels of all windows, row by row, of their places along either side."""
    down, across = rows[:, None, :, None], columns[None, :, None, :]
    return (down * width + across).masked_fill((down < 0) | (across < 0), -1).flatten(0, 1)
