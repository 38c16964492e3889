"""How much is measured: on a GPU, and as a test of all of it on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from benchmarks.gpu.families import Family, published, tiny
from benchmarks.gpu.subject import SizePx
from benchmarks.harness import Sampling
from benchmarks.kernels.cases import Sizes, cpu_sizes, gpu_sizes

CompileKind = Literal["blocks", "whole", "none"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of everything; the defaults are for a large GPU.

    Attributes:
        sides_px: of the square images whose steps are measured.
        exactness_px: one image of each in the checks.
        mixes: sizes of the batches of several sizes, by name.
        small_mixes: those of them that have an aim.
        default_px: size that the cost of a step is measured at, as a replica does.
        compiled: side and batch of the cells in which compiled diffusers is measured.
        copy_bytes: of the copy that bandwidth is measured with.
        kernel_rounds: samples of every implementation of an op.
        attention: heads, channels of a head and tokens of prompts, by model.
        attention_px: batches of them, by the sides of their images: of one size, and of several.
        wholes: families whose whole pipelines are loaded; of the first the stages are measured.
        num_ranks: of a group, a power of two; below 2 there is none.
        grouped: families that run on it.
        group_px: sides of its images; those of the simulator's size classes, for its profiles.
        group_rounds: samples of each of its steps, and exchanges.
        is_tiny: whether the models are.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cuda"))
    dtype: torch.dtype = torch.bfloat16
    families: tuple[Family, ...] = published()
    sides_px: tuple[int, ...] = (512, 768, 1024)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    exactness_px: tuple[SizePx, ...] = ((512, 512), (768, 512), (1024, 1024), (512, 512))
    mixes: Mapping[str, tuple[SizePx, ...]] = field(default_factory=lambda: dict(_MIXES))
    small_mixes: tuple[str, ...] = ("4: 512, 512x768", "8: 512, 512x768, 768x512")
    default_px: SizePx = (1024, 1024)
    compiled: tuple[tuple[int, int], ...] = ((1024, 1), (1024, 4), (512, 1), (512, 8))
    compile_kind: CompileKind = "blocks"
    compile_backend: str = "inductor"
    copy_bytes: int = 2 << 30
    kernel_sizes: Sizes = field(default_factory=lambda: gpu_sizes(torch.bfloat16))
    kernel_rounds: int = 20
    attention: Mapping[str, tuple[int, int, int]] = field(
        default_factory=lambda: {"sd3": (24, 64, 333), "flux": (24, 128, 512)}
    )
    attention_px: tuple[tuple[int, ...], ...] = (
        (512,) * 8,
        (1024,) * 4,
        (512,) * 3 + (768,) * 3 + (1024,) * 2,
    )
    wholes: tuple[str, ...] = ("sdxl", "flux")
    num_ranks: int = field(default_factory=lambda: usable_ranks(torch.cuda.device_count()))
    grouped: tuple[str, ...] = ("sd3", "flux")
    group_px: tuple[int, ...] = (256, 512, 1024, 2048)
    group_rounds: int = 20
    is_tiny: bool = False
    sampling: Sampling = field(default_factory=lambda: Sampling(0.03, 20, 3, 15))

    def family(self, name: str) -> Family:
        """Return a family by its name."""
        return next(one for one in self.families if one.name == name)


def usable_ranks(num_devices: int) -> int:
    """Return how many ranks a group has on so many devices, one each: up to 8, a power of two."""
    return 1 << min(num_devices, 8).bit_length() - 1 if num_devices else 0


_MIXES: Mapping[str, tuple[SizePx, ...]] = {
    "4: 512, 512x768": ((512, 512),) * 2 + ((512, 768),) * 2,
    "8: 512, 512x768, 768x512": ((512, 512),) * 4 + ((512, 768), (768, 512)) * 2,
    "4: 512, 768, 1024": ((512, 512),) * 2 + ((768, 768), (1024, 1024)),
    "8: 512, 768, 1024": ((512, 512),) * 3 + ((768, 768),) * 3 + ((1024, 1024),) * 2,
}


def tiny_settings(compile_kind: CompileKind, device: str) -> Settings:
    """Return tiny models and sizes: shows that everything works, and no figure to quote."""
    return Settings(
        device=torch.device(device),
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
        attention_px=((64, 64), (64, 64, 96)),
        num_ranks=0 if device == "cpu" else usable_ranks(torch.cuda.device_count()),
        group_px=(64, 128),
        group_rounds=3,
        is_tiny=True,
        sampling=Sampling(1e-3, most_calls=20, fewest_rounds=2, most_rounds=2),
    )
