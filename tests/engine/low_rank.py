"""Random low-rank deltas of layers, and the same merged into copies of diffusers' model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ray_cluster.engine.adapters.grouping import Delta
from ray_cluster.engine.adapters.low_rank import LowRank as Factors

# of a layer's weights, as standard deviations
_SIZE = 1.0

Chosen = Callable[[str], bool]
"""Whether the layer of a path has a delta."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One layer's: shrunk to ``[r, C, kh, kw]`` or ``[r, C]``, then expanded ``[D, r]``."""

    shrink: Tensor
    expand: Tensor
    padding: Any = 0
    stride: Any = 1

    @classmethod
    def random(cls, layer: Any, rank: int, generator: torch.Generator) -> LowRank:
        weight = layer.weight.detach()
        shrink = torch.randn(rank, *weight.shape[1:], generator=generator)
        expand = torch.randn(weight.shape[0], rank, generator=generator)
        expand *= _SIZE * float(weight.std()) / rank**0.5
        if isinstance(layer, nn.Conv2d):
            return cls(shrink, expand, layer.padding, layer.stride)
        return cls(shrink, expand)

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.ndim == 2:
            return F.linear(F.linear(inputs, self.shrink.flatten(1)), self.expand)
        shrunk = F.conv2d(inputs, self.shrink, stride=self.stride, padding=self.padding)
        return F.conv2d(shrunk, self.expand[:, :, None, None])

    @property
    def weight(self) -> Tensor:
        """What it comes to as part of the layer's weights."""
        return torch.einsum("dr,r...->d...", self.expand, self.shrink)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Deltas by the path of their layer."""

    by_path: dict[str, LowRank]

    @classmethod
    def random(
        cls, model: nn.Module, rank: int, seed: int, chosen: Chosen = lambda _path: True
    ) -> Adapter:
        generator = torch.Generator().manual_seed(seed)
        return cls(
            {
                path: LowRank.random(layer, rank, generator)
                for path, layer in model.named_modules()
                if isinstance(layer, nn.Linear | nn.Conv2d) and chosen(path)
            }
        )

    @property
    def deltas(self) -> dict[str, Delta]:
        return dict(self.by_path)

    @property
    def factors(self) -> dict[str, Delta]:
        """The same, with factors that the engine knows."""
        return {
            path: Factors(one.shrink, one.expand, one.stride, one.padding)
            for path, one in self.by_path.items()
        }

    def merged(self, model: nn.Module) -> Any:
        """Return a copy of diffusers' model with the deltas in its weights."""
        merged = copy.deepcopy(model)
        for path, one in self.by_path.items():
            merged.get_submodule(path).weight.data += one.weight  # type: ignore[operator]
        return merged
