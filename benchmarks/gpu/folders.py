"""Folders of whole pipelines whose weights are zeros: configurations, and headers of weights files.

The weights files are sparse: they have the length that their header says, and take no disk. A
denoiser may come with weights of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from benchmarks.gpu.families import MODELS, Family
from recipes.networks.tokenizer import build_tokenizer

_PROMPT_TOKENS = 77
_ITEM_BYTES = 2


def _tiny(config: Mapping[str, Any], prompt_width: int) -> dict[str, Any]:
    if "d_model" in config:
        few = {"d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        return {**config, **few, "d_model": prompt_width}
    few = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {**few, "hidden_size": 32, "projection_dim": 32}


def save_whole(
    folder: Path, family: Family, *, is_tiny: bool, denoiser: torch.nn.Module | None = None
) -> Path:
    """Write the folder of a family's pipeline.

    Args:
        family: the denoiser, published or tiny.
        is_tiny: whether the other models are.
        denoiser: with the weights that it is to have; without it they are zeros.
    """
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = _PROMPT_TOKENS
    own, vae = MODELS["families"][family.name], MODELS["vae"]
    vae = {**vae, **(MODELS["tiny vae"] if is_tiny else {}), **own["vae"]}
    with torch.device("meta"):
        models = {
            "unet" if family.is_unet else "transformer": denoiser
            or getattr(diffusers, family.kind)(**family.config),
            "vae": diffusers.AutoencoderKL(latent_channels=family.latent_shape((8, 8))[0], **vae),
        }
        for name, (encoder, size) in own["encoders"].items():
            class_, config = getattr(transformers, encoder), MODELS["encoders"][size]
            config = _tiny(config, family.prompt_width) if is_tiny else config
            models[name] = class_(class_.config_class(**config))
    tokenizers = {name.replace("text_encoder", "tokenizer"): tokenizer for name in own["encoders"]}
    scheduler = family.noise_scheduler()
    pipeline = getattr(diffusers, own["pipeline"])(**models, **tokenizers, scheduler=scheduler)
    pipeline.save_config(folder)
    for name, part in (*tokenizers.items(), ("scheduler", scheduler)):
        part.save_pretrained(folder / name)
    for name, model in models.items():
        is_encoder = name in own["encoders"]
        (model.config.save_pretrained if is_encoder else model.save_config)(folder / name)
        stem = "model" if is_encoder else "diffusion_pytorch_model"
        _write_weights(folder / name / f"{stem}.safetensors", model)
    return folder


def _write_weights(path: Path, model: torch.nn.Module) -> None:
    """Write a model's weights as bfloat16, or a hole where it has no data."""
    entries, tensors, end = {}, [], 0
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        start, end = end, end + _ITEM_BYTES * tensor.numel()
        tensors.append(tensor)
        entries[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            if not tensor.is_meta:
                file.write(tensor.bfloat16().flatten().view(torch.uint8).cpu().numpy().data)
        file.truncate(8 + len(header) + end)
