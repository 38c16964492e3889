"""Tokenizers, text encoders and autoencoders with small random weights, as families share them."""

from __future__ import annotations

from string import printable
from typing import Any

import diffusers
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ray_cluster.compat import processor_without_torchvision
from recipes.networks.tokenizer import build_tokenizer as build_clip_tokenizer
from tests.engine.random_models import text_config

Parts = dict[str, Any]

CHAT = """{% for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for one in message.content %}
{{- one.text if one.type == "text" else "<|vision_start|><|image_pad|><|vision_end|>" }}
{%- endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


_CHAT = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
)


# what stands for a picture in a prompt, and for a film
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


def build_tokenizer(more: tuple[str, ...] = ()) -> transformers.PreTrainedTokenizerFast:
    """A token for each character, and for some texts, with a chat template."""
    names = ["<pad>", "<unknown>", "<end>", *printable]
    core = Tokenizer(
        models.WordLevel({one: index for index, one in enumerate(names)}, unk_token="<unknown>")
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
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


def kl_vae(channels: int, num_blocks: int = 2) -> diffusers.AutoencoderKL:
    """An autoencoder that halves the sides once less than it has blocks."""
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * num_blocks,
        up_block_types=("UpDecoderBlock2D",) * num_blocks,
        block_out_channels=(16, *[32] * (num_blocks - 1)),
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=8,
        shift_factor=0.1,
    )


def plain_tokenizer() -> Any:
    tokenizer = build_tokenizer(VISION)
    tokenizer.chat_template = CHAT
    return tokenizer


def marking_tokenizer() -> Any:
    """One that puts a token before each text, so that none is empty."""
    tokenizer = plain_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 2)]
    )
    return tokenizer


def t5(width: int = 32, **more: Any) -> Any:
    config = {"d_model": width, "d_ff": 37, "d_kv": 8, "num_heads": 4, "num_layers": 2}
    tokens = len(plain_tokenizer())
    return transformers.T5EncoderModel(transformers.T5Config(vocab_size=tokens, **config | more))


def clip_text(width: int, kind: str = "CLIPTextModel", **more: Any) -> Any:
    config = text_config(width, build_clip_tokenizer())
    for name, value in more.items():
        setattr(config, name, value)
    return getattr(transformers, kind)(config)


def flow(**fields: Any) -> Any:
    return diffusers.FlowMatchEulerDiscreteScheduler(**fields)


def language(width: int = 16, layers: int = 2) -> Parts:
    """Of a language model that reads prompts."""
    return {
        "vocab_size": len(plain_tokenizer()),
        "hidden_size": width,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": width // 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def marks() -> Parts:
    """Of the marks that stand for pictures."""
    tokenizer = plain_tokenizer()
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(VISION))
    return {
        "image_token_id": image,
        "video_token_id": video,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
    }


def qwen3_vl(kind: str = "Qwen3VLForConditionalGeneration", layers: int = 2) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 16, "deepstack_visual_indexes": [0], "patch_size": 16}
    config = transformers.Qwen3VLConfig(
        text_config=language(layers=layers) | {"rope_parameters": rope},
        vision_config=vision | {"num_position_embeddings": 64},
        **marks(),
    )
    return getattr(transformers, kind)(config)


def processor_of(kind: str = "Qwen3VLProcessor") -> Any:
    parts: list[Any] = [plain_tokenizer()]
    if kind != "PixtralProcessor":
        size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
        patch = 16 if "3" in kind else 14
        parts.insert(0, transformers.Qwen2VLImageProcessorPil(patch_size=patch, size=size))
    return processor_without_torchvision(kind)(*parts, chat_template=CHAT)


def wan_vae(**more: Any) -> Any:
    small = {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return diffusers.AutoencoderKLWan(z_dim=16, **small | more)


def flux2_vae() -> Any:
    return diffusers.AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 4),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def gemma2() -> Any:
    return transformers.Gemma2Model(
        transformers.Gemma2Config(**language(8), query_pre_attn_scalar=4)
    )


def mistral3(layers: int, kind: str = "Mistral3ForConditionalGeneration") -> Any:
    vision = {"model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 4, "intermediate_size": 16, "image_size": 30, "patch_size": 6}
    config = transformers.Mistral3Config(
        text_config=language(layers=layers) | {"model_type": "mistral"},
        vision_config=vision,
        image_token_id=marks()["image_token_id"],
    )
    return getattr(transformers, kind)(config)


def dc_vae() -> Any:
    blocks, channels = ("ResBlock", "EfficientViTBlock"), (8, 8)
    return diffusers.AutoencoderDC(
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


def sana_transformer(**more: Any) -> Any:
    return diffusers.SanaTransformer2DModel(
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
        **more,
    )


def pixart_transformer() -> Any:
    return diffusers.PixArtTransformer2DModel(
        sample_size=32,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
    )


def flux2_transformer(**more: Any) -> Any:
    return diffusers.Flux2Transformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 4, 4, 4),
        **more,
    )
