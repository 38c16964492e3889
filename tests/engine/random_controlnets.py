"""Small random ControlNets beside a pipeline's UNet, and maps for them to follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import ControlNetModel

# strong enough that a missing one, or a wrong step's, shows at once
_STRENGTH = 0.05


def save_controlnets(pipeline: Any, folder: Path, count: int) -> list[Path]:
    """Write ControlNets that begin as copies of a pipeline's encoder half, their outputs random."""
    paths = []
    for index in range(count):
        torch.manual_seed(index)
        net = ControlNetModel.from_unet(
            pipeline.unet,
            conditioning_channels=3,
            conditioning_embedding_out_channels=(8, 8, 16, 16)[: _stages(pipeline)],
            controlnet_conditioning_channel_order=("rgb", "bgr")[index % 2],
        )
        outputs = [*net.controlnet_down_blocks, net.controlnet_mid_block]
        with torch.no_grad():
            for layer in outputs:
                layer.weight.normal_(0, _STRENGTH)
                layer.bias.normal_(0, _STRENGTH)
            net.controlnet_cond_embedding.conv_out.weight.normal_(0, 1)
        paths.append(folder / f"control-{index}")
        net.save_pretrained(paths[-1])
    return paths


def _stages(pipeline: Any) -> int:
    return int(pipeline.vae_scale_factor).bit_length()


def random_map(seed: int, width_px: int, height_px: int) -> npt.NDArray[np.uint8]:
    """A map ``[H, W, 3]``."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (height_px, width_px, 3), dtype=np.uint8)
