"""The built-in LoRAs, and random ones of the same layers and ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import MODEL
from ray_cluster.engine.adapters.lora_files import LoraFactors, read_lora
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.models.builtin import weights_folder

STYLES = ("pastel", "outline", "texture")
"""Their ranks are 4, 8 and 16."""


def file_of(style: str) -> Path:
    """Return the file of a built-in LoRA, as diffusers wrote it."""
    return weights_folder() / style / "pytorch_lora_weights.safetensors"


def read_styles() -> dict[str, LoraFactors]:
    """Return the built-in LoRAs by name."""
    base = resolve_folder(MODEL)
    return {style: read_lora(file_of(style), base) for style in STYLES}


@contextmanager
def loaded(pipeline: Any, choice: Mapping[str, float]) -> Iterator[None]:
    """Have diffusers' pipeline load LoRAs within the block, as a request of its own would."""
    with warnings.catch_warnings():
        # peft's, of the second LoRA beside the first
        warnings.simplefilter("ignore")
        for style in choice:
            pipeline.load_lora_weights(file_of(style), adapter_name=style)
        if choice:
            pipeline.set_adapters(list(choice), list(choice.values()))
    yield
    if choice:
        pipeline.unload_lora_weights()


def different(first: LoraFactors, count: int) -> list[LoraFactors]:
    """Return so many LoRAs of the same layers and ranks: the first one, and random others."""
    return [first, *(_random(first, seed) for seed in range(1, count))]


def _random(like: LoraFactors, seed: int) -> LoraFactors:
    generator = torch.Generator().manual_seed(seed)

    def drawn(one: torch.Tensor) -> torch.Tensor:
        return torch.randn(one.shape, generator=generator) * one.std()

    def layer(one: LowRank) -> LowRank:
        return LowRank(drawn(one.shrink), drawn(one.expand), one.stride, one.padding)

    return LoraFactors(
        {
            component: {path: layer(one) for path, one in layers.items()}
            for component, layers in like.by_component.items()
        }
    )


def chosen(per_request: int, count: int) -> list[Mapping[str, float]]:
    """Return which built-in LoRAs requests have, with their scales.

    Args:
        per_request: 0, 1 or 2 of them.
        count: of requests.
    """
    scales: Sequence[float] = (1.0,) if per_request == 1 else (0.7, 0.5)
    return [
        {STYLES[(index + place) % 3]: scales[place] for place in range(per_request)}
        for index in range(count)
    ]
