"""Folders of pipelines that the step engine does not cover, with small random weights.

Shapes are those of diffusers' own tests of these pipelines; the tokenizer is made here.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderKLQwenImage,
    DPMSolverMultistepScheduler,
    Flux2KleinPipeline,
    PixArtSigmaPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    UMT5Config,
    UMT5EncoderModel,
)

from tests.engine.family_parts import (
    VISION,
    build_tokenizer,
    dc_vae,
    flow,
    flux2_transformer,
    flux2_vae,
    gemma2,
    kl_vae,
    language,
    pixart_transformer,
    sana_transformer,
    t5,
)


def save_pixart(folder: Path) -> Path:
    """PixArt-Sigma, whose callback is of the old kind."""
    torch.manual_seed(0)
    PixArtSigmaPipeline(
        build_tokenizer(), t5(), kl_vae(4), pixart_transformer(), DPMSolverMultistepScheduler()
    ).save_pretrained(folder)
    return folder


def save_qwen(folder: Path) -> Path:
    """Qwen-Image, which is guided by ``true_cfg_scale``."""
    QwenImagePipeline(**qwen_parts()).save_pretrained(folder)
    return folder


def save_qwen_edit(folder: Path, pipeline: str) -> Path:
    """A Qwen-Image-Edit: the same, with a processor of pictures beside the tokenizer."""
    save_qwen(folder)
    parts = folder / "processor"
    build_tokenizer(VISION).save_pretrained(parts)
    Qwen2VLImageProcessorPil().save_pretrained(parts)
    index = folder / "model_index.json"
    content = json.loads(index.read_text()) | {"_class_name": pipeline}
    index.write_text(json.dumps(content | {"processor": ["transformers", "Qwen2VLProcessor"]}))
    return folder


def qwen_parts() -> dict[str, Any]:
    torch.manual_seed(0)
    tokenizer = build_tokenizer(VISION)
    tokens = dict(zip(VISION, tokenizer.convert_tokens_to_ids(list(VISION)), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
    }
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    encoder = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=text,
            vision_config=vision | {"out_hidden_size": 16},
            image_token_id=tokens["<|image_pad|>"],
            video_token_id=tokens["<|video_pad|>"],
            vision_start_token_id=tokens["<|vision_start|>"],
            vision_end_token_id=tokens["<|vision_end|>"],
        )
    )
    transformer = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return {
        "scheduler": flow(),
        "vae": vae,
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def save_z_image(folder: Path) -> Path:
    """Z-Image, whose guidance is off at 0."""
    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        in_channels=16,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[1024, 128, 128],
    )
    text = Qwen3Model(Qwen3Config(**language()))
    # what is created empty is to be the same in each test
    with torch.no_grad():
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    ZImagePipeline(flow(), kl_vae(16), text, build_tokenizer(), transformer).save_pretrained(folder)
    return folder


def save_sana(folder: Path) -> Path:
    """Sana, which reads instructions before the prompt."""
    torch.manual_seed(0)
    SanaPipeline(
        build_tokenizer(), gemma2(), dc_vae(), sana_transformer(), flow(shift=7.0)
    ).save_pretrained(folder)
    return folder


def save_aura(folder: Path) -> Path:
    """AuraFlow."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    transformer = AuraFlowTransformer2DModel(
        sample_size=32,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        out_channels=4,
        pos_embed_max_size=1024,
    )
    text = UMT5Config(
        vocab_size=len(tokenizer), d_model=32, d_ff=37, d_kv=8, num_heads=4, num_layers=2
    )
    # what is created empty is to be the same in each test
    with torch.no_grad():
        transformer.pos_embed.pos_embed.normal_()
        transformer.register_tokens.normal_()
    AuraFlowPipeline(
        tokenizer,
        UMT5EncoderModel(text),
        kl_vae(4),
        transformer,
        flow(),
    ).save_pretrained(folder)
    return folder


def save_klein(folder: Path) -> Path:
    """FLUX.2 klein (base), whose model looks at pictures, and whose second row is empty."""
    torch.manual_seed(0)
    # its layers 9, 18 and 27 are read
    text = Qwen3ForCausalLM(Qwen3Config(**language(layers=28)))
    transformer = flux2_transformer(timestep_guidance_channels=256, guidance_embeds=False)
    scheduler = flow(use_dynamic_shifting=True)
    Flux2KleinPipeline(
        scheduler, flux2_vae(), text, build_tokenizer(), transformer
    ).save_pretrained(folder)
    return folder


SAVE = {"pixart": save_pixart, "qwen": save_qwen, "z-image": save_z_image, "sana": save_sana}
SAVE_MORE = {"aura": save_aura, "klein": save_klein}
# these make nothing from text alone
SAVE_EDITORS = {
    "qwen-edit": partial(save_qwen_edit, pipeline="QwenImageEditPipeline"),
    "qwen-edit-plus": partial(save_qwen_edit, pipeline="QwenImageEditPlusPipeline"),
}
