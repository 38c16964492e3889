"""How much is measured: on a GPU, and as a test of all of it on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.gpu.families import Family, published, tiny
from benchmarks.gpu.subject import SizePx
from benchmarks.gpu.timing import Sampling
from benchmarks.kernels.cases import Sizes, cpu_sizes, gpu_sizes

CompileKind = Literal["blocks", "whole", "none"]
PARTS = ("kernels", "sdxl", "sd3", "flux")
# how the time is shared out
WEIGHTS: Mapping[str, float] = {"kernels": 1.0, "sdxl": 3.0, "sd3": 2.5, "flux": 4.0}


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of everything.

    Attributes:
        sides_px: of the square images whose steps are measured.
        exactness_px: one image of each in the checks.
        mixes: sizes of the batches of several sizes, by name.
        small_mixes: those of them that an aim is set for.
        default_px: size that the cost of a step is measured at, as a replica would.
        compiled: side and batch of the cells in which compiled diffusers is measured.
        copy_bytes: of the copy that bandwidth is measured with.
        kernel_rounds: samples of every implementation of an op.
        attention: heads, channels of a head and tokens of prompts of attention's cases.
        attention_px: sides of the images in them.
    """

    device: torch.device
    dtype: torch.dtype
    families: tuple[Family, ...]
    sides_px: tuple[int, ...]
    batches: tuple[int, ...]
    exactness_px: tuple[SizePx, ...]
    mixes: Mapping[str, tuple[SizePx, ...]]
    small_mixes: tuple[str, ...]
    default_px: SizePx
    compiled: tuple[tuple[int, int], ...]
    compile_kind: CompileKind
    compile_backend: str
    copy_bytes: int
    kernel_sizes: Sizes
    kernel_rounds: int
    attention: Mapping[str, tuple[int, int, int]]
    attention_px: tuple[int, ...]
    sampling: Sampling

    def family(self, name: str) -> Family:
        """Return a family by its name."""
        return next(one for one in self.families if one.name == name)


def gpu_settings(compile_kind: CompileKind) -> Settings:
    """Return what is measured on a large GPU."""
    return Settings(
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        families=published(),
        sides_px=(512, 768, 1024),
        batches=(1, 2, 4, 8),
        exactness_px=((512, 512), (768, 512), (1024, 1024), (512, 512)),
        mixes={
            "4: 512, 512x768": ((512, 512),) * 2 + ((512, 768),) * 2,
            "8: 512, 512x768, 768x512": ((512, 512),) * 4 + ((512, 768), (768, 512)) * 2,
            "4: 512, 768, 1024": ((512, 512),) * 2 + ((768, 768), (1024, 1024)),
            "8: 512, 768, 1024": ((512, 512),) * 3 + ((768, 768),) * 3 + ((1024, 1024),) * 2,
        },
        small_mixes=("4: 512, 512x768", "8: 512, 512x768, 768x512"),
        default_px=(1024, 1024),
        compiled=((1024, 1), (1024, 4), (512, 1), (512, 8)),
        compile_kind=compile_kind,
        compile_backend="inductor",
        copy_bytes=2 << 30,
        kernel_sizes=gpu_sizes(torch.bfloat16),
        kernel_rounds=20,
        attention={"sd3": (24, 64, 333), "flux": (24, 128, 512)},
        attention_px=(512,) * 3 + (768,) * 3 + (1024,) * 2,
        sampling=Sampling(),
    )


def tiny_settings(compile_kind: CompileKind, device: str) -> Settings:
    """Return tiny models and sizes: shows that everything works, and no figure to quote."""
    return Settings(
        device=torch.device(device),
        dtype=torch.bfloat16,
        families=tiny(),
        sides_px=(64,),
        batches=(1, 2),
        exactness_px=((64, 64), (96, 64), (96, 96), (64, 64)),
        mixes={
            "3: 64, 64x96": ((64, 64),) * 2 + ((64, 96),),
            "2: 64, 96": ((64, 64), (96, 96)),
        },
        small_mixes=("3: 64, 64x96",),
        default_px=(64, 64),
        compiled=((64, 1),),
        compile_kind=compile_kind,
        # traces and guards as ever; the compiler itself takes a minute
        compile_backend="eager",
        copy_bytes=1 << 22,
        kernel_sizes=cpu_sizes() if device == "cpu" else gpu_sizes(torch.bfloat16),
        kernel_rounds=2,
        attention={"sd3": (2, 16, 7), "flux": (2, 32, 9)},
        attention_px=(64, 64, 96),
        sampling=Sampling(sample_s=1e-3, fewest_rounds=2, most_rounds=2),
    )
