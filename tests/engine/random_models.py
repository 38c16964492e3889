"""Small models of the real classes with random weights: exactness does not need trained ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DDIMScheduler,
    EulerDiscreteScheduler,
    StableDiffusionInpaintPipeline,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from recipes.networks.tokenizer import build_tokenizer

_SCHEDULE = {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}


def text_config(width: int, tokenizer: Any) -> CLIPTextConfig:
    """The configuration of a small CLIP text encoder."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def save_sd(folder: Path, *, zero_snr: bool = True, inpaints: bool = False) -> Path:
    """Write a Stable Diffusion folder: v-prediction, or SD1.5's epsilon without zero SNR.

    Args:
        inpaints: whether its UNet takes a mask and masked latents, and its folder says so.
    """
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=16,
        in_channels=9 if inpaints else 4,
        block_out_channels=(16, 32, 32),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
        norm_num_groups=8,
        attention_head_dim=4,
    )
    vae = AutoencoderTiny(
        encoder_block_out_channels=(16, 16, 16),
        decoder_block_out_channels=(16, 16, 16),
        num_encoder_blocks=(1, 1, 1),
        num_decoder_blocks=(1, 1, 1),
    )
    if zero_snr:
        scheduler = DDIMScheduler(
            **_SCHEDULE,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
            steps_offset=1,
            clip_sample=False,
        )
    else:
        scheduler = DDIMScheduler(
            **_SCHEDULE, steps_offset=1, clip_sample=False, set_alpha_to_one=False
        )
    kind = StableDiffusionInpaintPipeline if inpaints else StableDiffusionPipeline
    return save_sd_pipeline(folder, unet, vae, scheduler, kind)


def save_sd_pipeline(
    folder: Path,
    unet: UNet2DConditionModel,
    vae: Any,
    scheduler: Any,
    kind: Any = StableDiffusionPipeline,
) -> Path:
    """Write the folder of Stable Diffusion with these parts and a small text encoder."""
    tokenizer = build_tokenizer()
    kind(
        vae=vae,
        text_encoder=CLIPTextModel(text_config(32, tokenizer)),
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def save_sdxl(folder: Path) -> Path:
    """Write an SDXL folder: two text encoders, added conditions, linear projections, KL codec."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    unet = UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 2),
        projection_class_embeddings_input_dim=6 * 8 + 32,
        cross_attention_dim=64,
        norm_num_groups=8,
    )
    vae = AutoencoderKL(
        block_out_channels=(16, 16, 16),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
    )
    StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=CLIPTextModel(text_config(32, tokenizer)),
        text_encoder_2=CLIPTextModelWithProjection(text_config(32, tokenizer)),
        tokenizer=tokenizer,
        tokenizer_2=tokenizer,
        unet=unet,
        scheduler=EulerDiscreteScheduler(**_SCHEDULE, timestep_spacing="leading", steps_offset=1),
    ).save_pretrained(folder)
    return folder
