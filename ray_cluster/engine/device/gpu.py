"""The GPU of this process: what a plan depends on, the share it is held to, and how exact it is."""

from __future__ import annotations

import torch

from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.policies.costs.gpu_shares import (
    CUDA_CONTEXT_BYTES,
    Card,
    replica_bytes,
    tensor_fraction,
)
from ray_cluster.policies.costs.number_formats import NumberFormat


def worker_device(pool: PoolConfig) -> torch.device:
    """Return the device of a replica of a pool, a GPU with its index.

    Tensors name their GPU by index: what is kept by device is found only by the same name.
    """
    if pool.device == "cpu":
        return torch.device("cpu")
    return torch.device(pool.device, torch.cuda.current_device())


def this_card() -> Card:
    """Return the GPU of this process; asking makes its CUDA context."""
    free, total = torch.cuda.mem_get_info()
    free_bytes = min(total, free + CUDA_CONTEXT_BYTES)
    return Card(total, free_bytes, torch.cuda.get_device_capability())


def number_format_here(pool: PoolConfig) -> NumberFormat:
    """Return the number format of a replica of a pool on this machine."""
    has_gpu = pool.device == "cuda"
    found = pool.number_format(torch.cuda.get_device_capability() if has_gpu else None)
    assert found is not None, "it is open only where the GPU is not known"
    return found


def prepare_card(pool: PoolConfig, card: Card, dtype: torch.dtype) -> None:
    """Hold this process to its share of the GPU and set the policy for TF32; before it loads.

    Beyond its share it runs out of memory as on a smaller GPU, and its neighbours do not.

    TF32 has float32's range with float16's ten bits of mantissa. Where a model runs in half
    precision, what is left in float32 is there for its range (an autoencoder that overflows, T5's
    ``wo``), so products and convolutions take TF32. A model in float32 is meant to be exact: none.
    """
    limit_bytes = replica_bytes(card, pool.num_gpus, pool.memory_bytes)
    torch.cuda.set_per_process_memory_fraction(tensor_fraction(card, limit_bytes))
    takes_tf32 = dtype != torch.float32
    torch.backends.cuda.matmul.allow_tf32 = takes_tf32
    torch.backends.cudnn.allow_tf32 = takes_tf32
