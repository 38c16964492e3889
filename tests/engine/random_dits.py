"""Small diffusion transformers of the real classes with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxFillPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from recipes.networks.tokenizer import build_tokenizer
from tests.engine.random_models import text_config

_CHANNELS = 8


def save_sd3(folder: Path, *, is_35: bool = False, shift: float = 3.0, has_t5: bool = True) -> Path:
    """Write a Stable Diffusion 3 folder, or 3.5: second attention, normalised heads."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=16,
        in_channels=_CHANNELS,
        out_channels=_CHANNELS,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=64,
        caption_projection_dim=32,
        pooled_projection_dim=64,
        pos_embed_max_size=24,
        qk_norm="rms_norm" if is_35 else None,
        dual_attention_layers=(0, 1) if is_35 else (),
    )
    StableDiffusion3Pipeline(
        transformer=_with_norms(transformer),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=_vae(),
        text_encoder=CLIPTextModelWithProjection(text_config(32, tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=CLIPTextModelWithProjection(text_config(32, tokenizer)),
        tokenizer_2=tokenizer,
        text_encoder_3=T5EncoderModel(_t5_config(64, tokenizer)) if has_t5 else None,
        tokenizer_3=tokenizer if has_t5 else None,
    ).save_pretrained(folder)
    return folder


def save_flux(
    folder: Path,
    *,
    is_distilled: bool = True,
    num_heads: int = 2,
    is_kontext: bool = False,
    is_fill: bool = False,
) -> Path:
    """Write a FLUX folder: guidance-distilled with a schedule by size, or as FLUX.1-schnell.

    Of Kontext's heads each query attends to few keys, so that it shows where these are.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    # beside latents: those of a masked image, and the mask's 4 x 4 pixels of each latent one
    conditions = _CHANNELS + 4 * 4 if is_fill else 0
    transformer = FluxTransformer2DModel(
        in_channels=4 * (_CHANNELS + conditions),
        out_channels=4 * _CHANNELS,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=num_heads,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        guidance_embeds=is_distilled,
        axes_dims_rope=(4, 6, 6),
    )
    whole = FluxFillPipeline if is_fill else FluxPipeline
    (FluxKontextPipeline if is_kontext else whole)(
        transformer=_with_norms(transformer, size=2.0 if is_kontext else 1.0),
        scheduler=FlowMatchEulerDiscreteScheduler(
            shift=3.0 if is_distilled else 1.0, use_dynamic_shifting=is_distilled
        ),
        vae=_vae(),
        text_encoder=CLIPTextModel(text_config(32, tokenizer)),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(_t5_config(32, tokenizer)),
        tokenizer_2=tokenizer,
    ).save_pretrained(folder)
    return folder


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=_CHANNELS,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=1.5,
        shift_factor=0.3,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _t5_config(width: int, tokenizer: Any) -> T5Config:
    return T5Config(
        vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=width, num_layers=2, num_heads=4
    )


def _with_norms(transformer: Any, size: float = 1.0) -> Any:
    """Give the norms of queries and keys weights that show where they are mixed up."""
    for name, weight in transformer.named_parameters():
        if ".norm_" in name and weight.ndim == 1 and "linear" not in name:
            weight.data = size * (1 + 0.3 * torch.randn_like(weight))
    return transformer
