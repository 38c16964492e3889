"""Folders of pipelines that the step engine does not cover, with small random weights.

Shapes are those of diffusers' own tests of these pipelines; the tokenizer is made here.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from string import printable
from typing import Any

import torch
from diffusers import (
    AuraFlowPipeline,
    AuraFlowTransformer2DModel,
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SanaPipeline,
    SanaTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

_CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)


# what stands for a picture in a prompt, and for a film
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def build_tokenizer(more: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    """A token for each character, and for some texts, with a chat template."""
    names = ["<pad>", "<unknown>", "<end>", *printable]
    core = Tokenizer(
        models.WordLevel({one: index for index, one in enumerate(names)}, unk_token="<unknown>")
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unknown>",
        eos_token="<end>",
        model_max_length=4096,
        padding_side="right",
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(more)})
    tokenizer.chat_template = _CHAT
    return tokenizer


def kl_vae(channels: int, num_blocks: int = 2) -> AutoencoderKL:
    """An autoencoder that halves the sides once less than it has blocks."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * num_blocks,
        up_block_types=("UpDecoderBlock2D",) * num_blocks,
        block_out_channels=(16, *[32] * (num_blocks - 1)),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=8,
        shift_factor=0.1,
    )


def save_pixart(folder: Path) -> Path:
    """PixArt-Sigma, whose callback is of the old kind."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    transformer = PixArtTransformer2DModel(
        sample_size=32,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
    )
    text = T5Config(
        vocab_size=len(tokenizer), d_model=32, d_ff=37, d_kv=8, num_heads=4, num_layers=2
    )
    PixArtSigmaPipeline(
        tokenizer, T5EncoderModel(text), kl_vae(4), transformer, DPMSolverMultistepScheduler()
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
        "scheduler": FlowMatchEulerDiscreteScheduler(),
        "vae": vae,
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


def save_z_image(folder: Path) -> Path:
    """Z-Image, whose guidance is off at 0."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
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
    text = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    # what is created empty is to be the same in each test
    with torch.no_grad():
        transformer.x_pad_token.normal_()
        transformer.cap_pad_token.normal_()
    ZImagePipeline(
        FlowMatchEulerDiscreteScheduler(), kl_vae(16), Qwen3Model(text), tokenizer, transformer
    ).save_pretrained(folder)
    return folder


def save_sana(folder: Path) -> Path:
    """Sana, which reads instructions before the prompt."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        patch_size=1,
    )
    blocks, channels = ("ResBlock", "EfficientViTBlock"), (8, 8)
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=blocks,
        decoder_block_types=blocks,
        encoder_block_out_channels=channels,
        decoder_block_out_channels=channels,
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
    )
    text = Gemma2Config(
        vocab_size=len(tokenizer),
        head_dim=16,
        hidden_size=8,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        num_key_value_heads=2,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
    SanaPipeline(tokenizer, Gemma2Model(text), vae, transformer, scheduler).save_pretrained(folder)
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
        FlowMatchEulerDiscreteScheduler(),
    ).save_pretrained(folder)
    return folder


def save_klein(folder: Path) -> Path:
    """FLUX.2 klein (base), whose model looks at pictures, and whose second row is empty."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    transformer = Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        timestep_guidance_channels=256,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )
    text = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        # its layers 9, 18 and 27 are read
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    Flux2KleinPipeline(
        scheduler, vae, Qwen3ForCausalLM(text), tokenizer, transformer
    ).save_pretrained(folder)
    return folder


SAVE = {"pixart": save_pixart, "qwen": save_qwen, "z-image": save_z_image, "sana": save_sana}
SAVE_MORE = {"aura": save_aura, "klein": save_klein}
# these make nothing from text alone
SAVE_EDITORS = {
    "qwen-edit": partial(save_qwen_edit, pipeline="QwenImageEditPipeline"),
    "qwen-edit-plus": partial(save_qwen_edit, pipeline="QwenImageEditPlusPipeline"),
}
