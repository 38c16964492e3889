"""A LoRA of random factors, for measuring what one costs on a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ray_cluster.engine.adapters.deltas import LayerDeltas
from ray_cluster.engine.adapters.low_rank import LowRank, packed
from ray_cluster.engine.step.executor import Executor

# what most LoRAs change (PEFT's and diffusers' scripts do by default), and a usual rank
_ENDINGS = ("to_q", "to_k", "to_v", "to_out.0")
_RANK = 16
# small, so that no step of the measurement overflows
_SIZE = 1e-3


def random_lora(executor: Executor[Any, Any], seed: int) -> LayerDeltas | None:
    """Return a LoRA of the attention's projections; None for a model that has none of these.

    Raises:
        ModelUnsupported: the model cannot have deltas in them.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        factors = torch.randn(shape, generator=generator) * _SIZE
        return factors.to(executor.device, executor.dtype)

    layers = {
        path: LowRank(drawn(_RANK, one.in_features), drawn(one.out_features, _RANK))
        for path, one in executor.layers.items()
        if path.endswith(_ENDINGS) and isinstance(one, nn.Linear)
    }
    return executor.bind(packed(layers)) if layers else None
