"""Compiles every kernel for a GPU that need not be there; run as a program, prints their names.

Usage: ``python -m tests.kernels.compiling CASES``, 1 or 2.

What the interpreter lets pass the compiler may not: names that a kernel cannot see, an argument
of 1 that is a constant, a variable that changes its type in a loop.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from ray_cluster.kernels.grouped_low_rank.reference import RowGroups
from tests.kernels.ops import EPS, Ops, offsets_of

_compile = JITFunction.run


class NoDevice:
    """A driver that knows what to compile for and cannot launch anything."""

    def get_current_target(self) -> GPUTarget:
        """An H100 or H200."""
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The only one."""
        return 0


def main() -> None:
    """Call every op as an engine does, with kernels compiled and not launched."""
    assert not triton.knobs.runtime.interpret, "needs TRITON_INTERPRET=0"
    driver.set_active(NoDevice())

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled = _compile(kernel, *args, grid=grid, warmup=True, **kwargs)
        sys.stdout.write(f"{kernel.__name__}\n")
        return compiled

    JITFunction.run = run
    ops = Ops("triton", "cpu")
    # halves of a real model's width, and rows of one column, images of one row
    cases = (([64, 256], 320, 32, torch.bfloat16), ([1], 1, 1, torch.float32))
    for sizes, channels, groups, dtype in cases[: int(sys.argv[1])]:
        call_all(ops, sizes, channels, groups, dtype)


def call_all(ops: Ops, sizes: list[int], channels: int, groups: int, dtype: torch.dtype) -> None:
    """Call every op once or with every choice; results are what the memory held."""
    offsets, num_rows = offsets_of(sizes), sum(sizes)
    x, weight = torch.zeros(num_rows, channels, dtype=dtype), torch.zeros(channels, dtype=dtype)
    index = torch.zeros(num_rows, dtype=torch.int32)
    norm = (x, offsets, groups, weight, weight, EPS)
    ops("group_norm_silu", "group_norm_silu", *norm, silu=True)
    ops("group_norm_silu", "group_norm_silu", *norm, silu=False)
    ops("segment_stats", "segment_stats", x, offsets, groups, EPS)
    ops("geglu", "geglu", torch.zeros(num_rows, 2 * channels, dtype=dtype))
    factors = torch.zeros(1, 16, channels, dtype=dtype)
    ops("grouped_low_rank", "grouped_low_rank", x, x, factors, factors, RowGroups(0, sizes[0], 1))
    ops("row_gather", "row_gather", x, index)
    ops("row_scatter", "row_scatter", x, x, index)
    coefficients = torch.zeros(num_rows, 8)
    ops("sampler_update", "sampler_update", x, x, x, x, coefficients, index)
    ops("sampler_update", "sampler_update", x, x, x, None, coefficients)


if __name__ == "__main__":
    main()
