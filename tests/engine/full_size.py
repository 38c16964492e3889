"""Folders of SDXL and FLUX.1 at their published sizes, without weights: configurations and headers.

The weights files are sparse: they have the length that their header says, and take no disk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from benchmarks.gpu.families import published
from tests.engine.random_dits import save_flux
from tests.engine.random_models import save_sdxl

_DENOISERS = {one.name: one.config for one in published()}
_VAE: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "sample_size": 1024,
}
_CLIP_L: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
_CLIP_G: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
_T5_XXL: dict[str, Any] = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "vocab_size": 32128,
}


def save_sdxl_headers(folder: Path) -> Path:
    """Write SDXL 1.0's folder."""
    save_sdxl(folder)
    with torch.device("meta"):
        models = {
            "unet": UNet2DConditionModel(**_DENOISERS["sdxl"]),
            "vae": AutoencoderKL(latent_channels=4, scaling_factor=0.13025, **_VAE),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**_CLIP_L)),
            "text_encoder_2": CLIPTextModelWithProjection(CLIPTextConfig(**_CLIP_G)),
        }
    return _replaced(folder, models)


def save_flux_headers(folder: Path) -> Path:
    """Write FLUX.1-dev's folder."""
    save_flux(folder)
    bare = {"use_quant_conv": False, "use_post_quant_conv": False}
    scales = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
    with torch.device("meta"):
        models = {
            "transformer": FluxTransformer2DModel(**_DENOISERS["flux"]),
            "vae": AutoencoderKL(latent_channels=16, **_VAE, **bare, **scales),
            "text_encoder": CLIPTextModel(CLIPTextConfig(**_CLIP_L)),
            "text_encoder_2": T5EncoderModel(T5Config(**_T5_XXL)),
        }
    return _replaced(folder, models)


def _replaced(folder: Path, models: dict[str, Any]) -> Path:
    """Put models in the place of a folder's small ones."""
    for name, model in models.items():
        (old,) = (folder / name).glob("*.safetensors")
        model.save_config(folder / name) if name in {"unet", "transformer", "vae"} else (
            model.config.save_pretrained(folder / name)
        )
        _write_header(old, model)
    return folder


def _write_header(path: Path, model: torch.nn.Module) -> None:
    entries, end = {}, 0
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        start, end = end, end + 2 * tensor.numel()
        entries[name] = {
            "dtype": "F16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)
