"""Tokenizers, text encoders and autoencoders with small random weights, as families share them."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from tokenizers.processors import TemplateProcessing

from ray_cluster.compat import processor_without_torchvision
from recipes.networks.tokenizer import build_tokenizer as build_clip_tokenizer
from tests.engine.random_models import text_config
from tests.engine.random_pipelines import VISION, build_tokenizer

Parts = dict[str, Any]

CHAT = """{% for message in messages %}<{{ message.role }}>
{%- if message.content is string %}{{ message.content }}{% else %}
{%- for one in message.content %}
{{- one.text if one.type == "text" else "<|vision_start|><|image_pad|><|vision_end|>" }}
{%- endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


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
