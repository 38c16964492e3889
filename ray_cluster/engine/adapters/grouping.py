"""Low-rank products of several requests of a batch, in as few calls as their rows allow.

Where the products of single requests are so small that calls take longer than the arithmetic, the
factors are stacked, with zeros up to the largest rank, and one call serves all requests whose rows
are as many and as far apart. Sets of one shape are stacked at once, by one copy of all their
layers. Those of different layers or ranks are stacked layer by layer, which takes about as long as
is saved in three steps: only rows that were in as many before. The stacks are kept as long as the
batch has the same requests.
Large products run one by one with the factors as they are: copies would take memory and save
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.kernels.grouped_low_rank.op import grouped_low_rank
from ray_cluster.kernels.grouped_low_rank.reference import RowGroups

Delta = Callable[[Tensor], Tensor]
"""From a layer's inputs to what is added to its outputs.

Linear layers and convolutions over single pixels: from rows ``[n, C]`` to ``[n, D]``. Other
convolutions: from images ``[n, C, h, w]`` to ``[n, D, h', w']``, with the padding and stride of the
layer itself."""

Addition = Callable[[Tensor, Tensor, slice], None]
"""Adds to outputs what some rows' deltas make of the inputs, of these columns of theirs."""

# multiplications of a request's shrink product up to which calls are what it costs
_SMALL_PRODUCT = 1 << 22
# of the factors of all layers of a batch's requests, beyond which only small layers are stacked
_MOST_WHOLE_BYTES = 64 << 20
# of the windows of all images of a convolution
_MOST_WINDOW_ELEMENTS = 1 << 22


class Stack(NamedTuple):
    """Factors of several requests, ``[G, r, C]`` and ``[G, r, D]``."""

    shrink: Tensor
    expand: Tensor


class Stacks:
    """Stacks of factors that were made, by the factors.

    Attributes:
        are_worthwhile: whether the same rows are likely to be in further steps.
    """

    def __init__(self) -> None:
        self.are_worthwhile = False
        self._known: dict[tuple[int, ...], tuple[Sequence[LowRank], Stack]] = {}
        self._whole: dict[tuple[int, ...], tuple[Sequence[Tensor], Tensor]] = {}

    def are_cheap(self, several: Sequence[LowRank]) -> bool:
        """Whether one copy stacks the factors of all layers of several requests."""
        home = several[0].home
        if home is None or home.factors.nbytes * len(several) > _MOST_WHOLE_BYTES:
            return False
        position = home.position
        return all(one.home is not None and one.home.position == position for one in several)

    def of(self, several: Sequence[LowRank]) -> Stack:
        """Return the factors of one layer stacked."""
        if self.are_cheap(several):
            return self._part(several)
        key = tuple(map(id, several))
        if key not in self._known:
            # the factors are kept with them, so that no other object has their ids
            self._known[key] = (several, _stacked(several))
        return self._known[key][1]

    def _part(self, several: Sequence[LowRank]) -> Stack:
        """Return the part of a layer in a stack of all layers' factors."""
        wholes = [one.home.factors for one in several if one.home is not None]
        key = tuple(map(id, wholes))
        if key not in self._whole:
            self._whole[key] = (wholes, torch.stack(wholes))
        stack, home = self._whole[key][1], several[0].home
        assert home is not None, "those without one are stacked layer by layer"
        begin, middle, _, (shrink, expand) = home.position
        return Stack(
            stack[:, begin : begin + shrink.numel()].view(len(several), shrink[0], -1),
            stack[:, middle : middle + expand.numel()].view(len(several), shrink[0], -1),
        )


def _stacked(several: Sequence[LowRank]) -> Stack:
    rank = max(one.rank for one in several)
    # of convolutions in the order of a window's elements
    shrinks = [
        one.shrink.permute(0, 2, 3, 1).flatten(1) if one.shrink.ndim == 4 else one.shrink
        for one in several
    ]
    return Stack(
        torch.stack([_filled(one, rank) for one in shrinks]),
        torch.stack([_filled(one.expand.t(), rank) for one in several]),
    )


def _filled(factor: Tensor, rank: int) -> Tensor:
    lacking = rank - len(factor)
    return F.pad(factor, (0, 0, 0, lacking)) if lacking else factor


def additions(
    spans: Sequence[tuple[slice, Delta]], num_dimensions: int, stacks: Stacks
) -> tuple[Addition, ...]:
    """Return how the deltas of one layer are added.

    Args:
        spans: rows or images in rising order, each with their delta.
        num_dimensions: of the layer's inputs: 2 for rows, 4 for images.
    """
    found: list[Addition] = []
    for groups, deltas in _regular(spans):
        low_rank = [one for one in deltas if isinstance(one, LowRank)]
        if len(low_rank) < len(deltas):
            found += [
                _Called(*one) for one in zip(_slices(groups, len(deltas)), deltas, strict=True)
            ]
        elif num_dimensions == 4:
            found.append(_Convolved(groups, low_rank, stacks))
        elif _is_small(groups.length, low_rank) and _can_be_stacked(low_rank, stacks):
            found.append(_Rows(groups, stacks.of(low_rank)))
        else:
            for rows, one in zip(_slices(groups, len(low_rank)), low_rank, strict=True):
                own = RowGroups(rows.start, groups.length, groups.length)
                found.append(_Rows(own, Stack(one.shrink.flatten(1)[None], one.expand.t()[None])))
    return tuple(found)


def _can_be_stacked(several: Sequence[LowRank], stacks: Stacks) -> bool:
    return len(several) > 1 and (stacks.are_worthwhile or stacks.are_cheap(several))


def _is_small(length: int, several: Sequence[LowRank]) -> bool:
    return length * max(one.shrink.numel() for one in several) <= _SMALL_PRODUCT


def _regular(
    spans: Sequence[tuple[slice, Delta]],
) -> Iterator[tuple[RowGroups, list[Delta]]]:
    """Yield runs of spans of one length that begin at equal distances."""
    index = 0
    while index < len(spans):
        first, length = spans[index][0].start, _length(spans[index][0])
        end, step = index + 1, length
        if end < len(spans):
            step = spans[end][0].start - first
        while (
            end < len(spans)
            and _length(spans[end][0]) == length
            and spans[end][0].start == first + (end - index) * step
        ):
            end += 1
        yield RowGroups(first, length, step), [delta for _, delta in spans[index:end]]
        index = end


def _length(rows: slice) -> int:
    return int(rows.stop - rows.start)


def _slices(groups: RowGroups, count: int) -> list[slice]:
    starts = (groups.first + number * groups.step for number in range(count))
    return [slice(start, start + groups.length) for start in starts]


@dataclass(frozen=True, slots=True)
class _Called:
    """A delta of some rows or images that is known by its results alone."""

    rows: slice
    delta: Delta

    def __call__(self, inputs: Tensor, outputs: Tensor, columns: slice) -> None:
        outputs[self.rows].add_(self.delta(inputs[self.rows])[:, columns])


@dataclass(frozen=True, slots=True)
class _Rows:
    """Products of groups of rows of a matrix."""

    groups: RowGroups
    factors: Stack

    def __call__(self, inputs: Tensor, outputs: Tensor, columns: slice) -> None:
        shrink, expand = self.factors
        grouped_low_rank(outputs, inputs, shrink, expand[:, :, columns], self.groups)


class _Convolved:
    """Convolutions of groups of images, and products of what they give."""

    def __init__(self, groups: RowGroups, several: Sequence[LowRank], stacks: Stacks) -> None:
        self._groups, self._several, self._stacks = groups, several, stacks
        self._can_be_stacked = _can_be_stacked(several, stacks)
        self._each = _slices(groups, len(several))
        self._images = slice(groups.first, self._each[-1].stop)
        self._expands = [one.expand.t() for one in several]

    def __call__(self, inputs: Tensor, outputs: Tensor, columns: slice) -> None:
        made = outputs.permute(0, 2, 3, 1)
        if not made.is_contiguous():
            for images, one in zip(self._each, self._several, strict=True):
                _Called(images, one)(inputs, outputs, columns)
        elif self._can_be_stacked and self._has_small_windows(inputs, made):
            self._together(inputs, made, columns)
        else:
            self._one_by_one(inputs, made, columns)

    def _one_by_one(self, inputs: Tensor, made: Tensor, columns: slice) -> None:
        for images, one, expand in zip(self._each, self._several, self._expands, strict=True):
            shrunk = F.conv2d(inputs[images], one.shrink, stride=one.stride, padding=one.padding)
            rows = shrunk.permute(0, 2, 3, 1).flatten(0, 2)
            made[images].flatten(0, 2).addmm_(rows, expand[:, columns])

    def _together(self, inputs: Tensor, made: Tensor, columns: slice) -> None:
        windows = _windows(inputs[self._images], self._several[0])
        pixels = made.shape[1] * made.shape[2]
        groups = RowGroups(0, self._groups.length * pixels, self._groups.step * pixels)
        shrink, expand = self._stacks.of(self._several)
        rows = made[self._images].flatten(0, 2)
        grouped_low_rank(rows, windows, shrink, expand[:, :, columns], groups)

    def _has_small_windows(self, inputs: Tensor, made: Tensor) -> bool:
        _, height, width, _ = made.shape
        num_images = self._images.stop - self._images.start
        num_elements = num_images * height * width * self._several[0].shrink[0].numel()
        return not inputs.is_cuda and num_elements <= _MOST_WINDOW_ELEMENTS


def _windows(images: Tensor, like: LowRank) -> Tensor:
    """Return what a convolution makes of each pixel, ``[n * h' * w', kh * kw * C]``."""
    height, width = like.shrink.shape[2:]
    down, across = like.padding
    padded = F.pad(images.permute(0, 2, 3, 1), (0, 0, across, across, down, down)).contiguous()
    num_images, full_height, full_width, channels = padded.shape
    image, line, pixel, _ = padded.stride()
    by_line, by_pixel = like.stride
    shape = (
        num_images,
        (full_height - height) // by_line + 1,
        (full_width - width) // by_pixel + 1,
        height,
        width * channels,
    )
    strides = (image, by_line * line, by_pixel * pixel, line, 1)
    windows = padded.as_strided(shape, strides)
    return windows.reshape(-1, height * width * channels)
