"""Low-rank products: what a LoRA adds to the outputs of a layer, without being merged into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LowRank:
    """The factors of one layer: its outputs gain ``expand @ shrink`` of its inputs.

    Attributes:
        shrink: ``[r, C]`` of a linear layer, ``[r, C, kh, kw]`` of a convolution.
        expand: ``[D, r]``, with the LoRA's own scale (alpha over rank).
        stride: of a convolution, that of the layer.
        padding: likewise.
    """

    shrink: Tensor
    expand: Tensor
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)

    @property
    def rank(self) -> int:
        """Columns between the two factors."""
        return self.expand.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of both factors."""
        return self.shrink.nbytes + self.expand.nbytes

    def __call__(self, inputs: Tensor) -> Tensor:
        """Return what is added, as :data:`ray_cluster.engine.deltas.Delta` has it."""
        if inputs.ndim == 2:
            return F.linear(F.linear(inputs, self.shrink.flatten(1)), self.expand)
        shrunk = F.conv2d(inputs, self.shrink, stride=self.stride, padding=self.padding)
        return F.conv2d(shrunk, self.expand[:, :, None, None])

    def scaled(self, scale: float) -> LowRank:
        """Return the factors of a LoRA that counts ``scale`` times."""
        return LowRank(self.shrink, self.expand * scale, self.stride, self.padding)

    def to(self, device: torch.device, dtype: torch.dtype) -> LowRank:
        """Return them on a device, in a dtype, in the order in which products read them.

        Those of a convolution have the channels of a pixel beside each other, expanding factors the
        outputs of a rank.
        """
        shrink = self.shrink.to(device, dtype)
        if shrink.ndim == 4:
            shrink = shrink.contiguous(memory_format=torch.channels_last)
        expand = self.expand.to(device, dtype).t().contiguous().t()
        return LowRank(shrink, expand, self.stride, self.padding)


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
