"""The order in which an autoencoder's weights, and with them its activations, lie in memory."""

from __future__ import annotations

from typing import TypeVar

import torch

ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)


def in_decoders_format(vae: ModuleT, device: torch.device) -> ModuleT:
    """Convert an autoencoder in place to what is fastest on the device; return it.

    On the CPU that is channels last, whatever order the latents have: the bundled model's takes
    0.6 to 0.85 of its time at 1 to 16 images of 64 to 128 px, one as large as Stable Diffusion's
    as long as before. On a GPU nothing was measured, and nothing is changed.

    The denoiser's weights are brought into order by its executor (``packed_weights.py``).
    """
    if device.type == "cpu":
        for part in vae.modules():
            if isinstance(part, torch.nn.Conv2d):
                # not Module.to: that refuses the fake tensors by which memory is planned
                weight = part.weight.data
                part.weight.data = weight.contiguous(memory_format=torch.channels_last)
    return vae
