"""Folders in the layout of published repositories: true configurations scaled down, random weights.

What is scaled down: channels, layers, attention heads, sizes, text encoders and vocabularies. Block
types, schedulers, kinds of prediction and conditions are the repositories' own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    LCMScheduler,
    PNDMScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from recipes.networks.tokenizer import build_tokenizer
from tests.engine.random_dits import save_flux, save_sd3
from tests.engine.random_models import save_sd_pipeline, text_config

_SCHEDULE: dict[str, Any] = {
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "beta_end": 0.012,
}
_TRAILING = _SCHEDULE | {"timestep_spacing": "trailing", "steps_offset": 1}
_XL_BLOCKS: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
}

_LEADING = _SCHEDULE | {"timestep_spacing": "leading", "steps_offset": 1}
# scheduler, and what the UNet has beside the family's own
_SD: dict[str, tuple[Any, dict[str, Any]]] = {
    "sd-1.5": (
        PNDMScheduler(**_LEADING, skip_prk_steps=True, set_alpha_to_one=False),
        {"attention_head_dim": 4},
    ),
    "sd-2.1-v": (
        DDIMScheduler(
            **_LEADING, prediction_type="v_prediction", set_alpha_to_one=False, clip_sample=False
        ),
        {"attention_head_dim": (2, 4, 4, 4), "use_linear_projection": True},
    ),
}
_SDXL: dict[str, tuple[Any, dict[str, Any]]] = {
    "sdxl-base": (EulerDiscreteScheduler(**_LEADING), {}),
    "sdxl-turbo": (EulerAncestralDiscreteScheduler(**_TRAILING), {}),
    "sdxl-lightning": (EulerDiscreteScheduler(**_TRAILING), {}),
    "lcm-sdxl": (
        LCMScheduler(**_SCHEDULE, original_inference_steps=50),
        {"time_cond_proj_dim": 16},
    ),
    "ssd-1b": (
        EulerDiscreteScheduler(**_LEADING),
        {
            "mid_block_type": "UNetMidBlock2D",
            "transformer_layers_per_block": ((0, 0), (2, 2), (2, 1)),
            "reverse_transformer_layers_per_block": ((2, 2, 1), (2, 1, 1), (0, 0, 0)),
        },
    ),
}
_DITS: dict[str, Callable[[Path], Path]] = {
    "sd3-medium": save_sd3,
    "sd3-medium-without-t5": partial(save_sd3, has_t5=False),
    "sd-3.5": partial(save_sd3, is_35=True),
    "flux-dev": save_flux,
    "flux-schnell": partial(save_flux, is_distilled=False),
}
LAYOUTS = (*_SD, *_SDXL, *_DITS)


def save_published(folder: Path, layout: str) -> Path:
    """Write the folder of a layout."""
    if layout in _DITS:
        return _DITS[layout](folder)
    save, (scheduler, options) = (
        (_save_sd, _SD[layout]) if layout in _SD else (_save_sdxl, _SDXL[layout])
    )
    return save(folder, scheduler, **options)


def _save_sd(folder: Path, scheduler: Any, **options: Any) -> Path:
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32, 32, 32),
        layers_per_block=2,
        cross_attention_dim=32,
        norm_num_groups=8,
        **options,
    )
    return save_sd_pipeline(folder, unet, _vae(), scheduler)


def _save_sdxl(folder: Path, scheduler: Any, **options: Any) -> Path:
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32, 32),
        layers_per_block=2,
        attention_head_dim=(2, 4, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=64,
        norm_num_groups=8,
        **(_XL_BLOCKS | options),
    )
    StableDiffusionXLPipeline(
        vae=_vae(),
        text_encoder=CLIPTextModel(text_config(32, tokenizer)),
        text_encoder_2=CLIPTextModelWithProjection(text_config(32, tokenizer)),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=scheduler,
    ).save_pretrained(folder)
    return folder


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
    )
