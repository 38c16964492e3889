"""Low-rank products: what a LoRA adds to the outputs of a layer, without being merged into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Position(NamedTuple):
    """Where the factors of a layer stand in a vector of all layers' factors, and what they are.

    Attributes:
        shrink: where ``[r, kh, kw, C]`` begins.
        expand: where ``[r, D]`` begins.
        size: of the vector.
        shapes: of both factors.
    """

    shrink: int
    expand: int
    size: int
    shapes: tuple[torch.Size, torch.Size]


class Home(NamedTuple):
    """A vector of all layers' factors, and where in it those of a layer are."""

    factors: Tensor
    position: Position


@dataclass(frozen=True, slots=True)
class LowRank:
    """The factors of one layer: its outputs gain ``expand @ shrink`` of its inputs.

    Attributes:
        shrink: ``[r, C]`` of a linear layer, ``[r, C, kh, kw]`` of a convolution.
        expand: ``[D, r]``, with the LoRA's own scale (alpha over rank).
        stride: of a convolution, that of the layer.
        padding: likewise.
        home: where they stand beside those of other layers, if they do.
    """

    shrink: Tensor
    expand: Tensor
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    home: Home | None = field(default=None, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """Columns between the two factors."""
        return self.expand.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of both factors."""
        return self.shrink.nbytes + self.expand.nbytes

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return what is added, as :data:`ray_cluster.engine.adapters.deltas.Delta` has it."""
        if inputs.ndim == 2:
            return F.linear(F.linear(inputs, self.shrink.flatten(1)), self.expand)
        shrunk = F.conv2d(inputs, self.shrink, stride=self.stride, padding=self.padding)
        return F.conv2d(shrunk, self.expand[:, :, None, None])

    def scaled(self, scale: float) -> LowRank:
        """Return the factors of a LoRA that counts ``scale`` times."""
        return LowRank(self.shrink, self.expand * scale, self.stride, self.padding)

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        """Return them on a device, in a dtype."""
        return LowRank(
            self.shrink.to(device, dtype),
            self.expand.to(device, dtype),
            self.stride,
            self.padding,
        )


def joined(several: Sequence[LowRank]) -> LowRank:
    """Return the sum of products of one layer as one of their ranks together."""
    first = several[0]
    if len(several) == 1:
        return first
    return LowRank(
        torch.cat([one.shrink for one in several]),
        torch.cat([one.expand for one in several], dim=1),
        first.stride,
        first.padding,
    )


def packed(layers: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Return the same factors in one vector, in the order in which products read them.

    One copy then stacks those of all layers beside another request's.
    """
    parts: list[Tensor] = []
    for one in layers.values():
        shrink = one.shrink.permute(0, 2, 3, 1) if one.shrink.ndim == 4 else one.shrink
        parts += [shrink.flatten(), one.expand.t().flatten()]
    if not parts:
        return {}
    whole = torch.cat(parts)
    starts = iter(accumulate((part.numel() for part in parts), initial=0))
    found = {}
    for path, one in layers.items():
        shapes = one.shrink.shape, one.expand.shape
        position = Position(next(starts), next(starts), whole.numel(), shapes)
        found[path] = _at_home(one, Home(whole, position))
    return found


def _at_home(one: LowRank, home: Home) -> LowRank:
    factors, (begin, middle, _, ((rank, *inner), _)) = home
    shrink, expand = (
        factors[start : start + part.numel()].view(rank, -1)
        for start, part in ((begin, one.shrink), (middle, one.expand))
    )
    if len(inner) == 3:
        channels, height, width = inner
        shrink = shrink.view(rank, height, width, channels).permute(0, 3, 1, 2)
    return LowRank(shrink, expand.t(), one.stride, one.padding, home)
