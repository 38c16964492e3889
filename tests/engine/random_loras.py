"""LoRA files with random factors for the layers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
OF_ENCODER = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
Pairs = dict[str, tuple[Tensor, Tensor]]
"""By path of the layer: down ``[r, C, ...]`` and up ``[D, r, ...]``."""


def pairs(
    model: nn.Module, ending: tuple[str, ...], rank: int = 3, seed: int = 0, size: float = 1.0
) -> Pairs:
    """Random factors for the layers of a model whose paths end like that.

    Args:
        size: of what they add to outputs, about, for inputs of size 1.
    """
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and path.endswith(ending):
            weight: Tensor = layer.weight
            down = torch.randn((rank, *weight.shape[1:]), generator=generator)
            shape = (weight.shape[0], rank, *[1] * (weight.ndim - 2))
            up = torch.randn(shape, generator=generator)
            found[path] = (down * size / weight[0].numel() ** 0.5, up / rank**0.5)
    assert found
    return found


def peft_keys(component: str, layers: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {
        f"{component}.{path}.lora_{part}.weight": one
        for path, pair in layers.items()
        for part, one in zip("AB", pair, strict=True)
    }


def kohya_keys(
    prefix: str, layers: Mapping[str, tuple[Tensor, Tensor]], alpha: float
) -> dict[str, Tensor]:
    found = {}
    for path, (down, up) in layers.items():
        name = f"{prefix}_{path.replace('.', '_')}"
        found[f"{name}.lora_down.weight"] = down
        found[f"{name}.lora_up.weight"] = up
        found[f"{name}.alpha"] = torch.tensor(alpha)
    return found


def save_loras(pipeline: Any, folder: Path, count: int, size: float = 0.5) -> list[Path]:
    """Write LoRAs of different ranks for a pipeline: attention, convolutions, text encoders.

    The second of them has no text encoder.
    """
    paths = []
    for index in range(count):
        name = "unet" if hasattr(pipeline, "unet") else "transformer"
        endings = (*ATTENTION, "conv1", "conv2", "net.2", "proj_in")
        layers = pairs(getattr(pipeline, name), endings, 2 + index, index, size)
        tensors = peft_keys(name, layers)
        for part in ("text_encoder", "text_encoder_2"):
            if part in pipeline._lora_loadable_modules and index != 1:
                encoder = getattr(pipeline, part)
                layers = pairs(encoder, ("q_proj", "out_proj", "fc1"), 2 + index, index, size)
                tensors |= peft_keys(part, layers)
        paths.append(folder / f"lora{index}.safetensors")
        save_file(tensors, paths[-1])
    return paths
