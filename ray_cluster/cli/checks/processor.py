"""Which numbers this machine's processor computes with quickly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ray_cluster.cli.checks.finding import Finding, ok, warning
from ray_cluster.config.pools import PoolConfig
from ray_cluster.process.machine import cpu_model


def check_processor(pools: Sequence[PoolConfig]) -> Iterator[Finding]:
    """Yield what there is to say of the processor, as far as pools compute on it."""
    found = f"{cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"
    slow = {pool.dtype for pool in pools if pool.device == "cpu" and not has_fast(pool.dtype)}
    if not slow:
        yield ok("processor", found)
    for dtype in sorted(slow):
        names = ", ".join(pool.name for pool in pools if pool.dtype == dtype)
        yield warning(
            "processor",
            f"{found}: no instructions for {dtype} (pool {names})",
            f"{dtype} is emulated and takes three to four times as long; set dtype: float32",
        )


def has_fast(dtype: str) -> bool:
    """Whether a model computes in numbers of that kind about as fast as in float32, or faster."""
    if dtype == "float32":
        return True
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == "bfloat16":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
