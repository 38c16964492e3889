"""Families of diffusers' pipelines with small random weights, the first half of the alphabet."""

from __future__ import annotations

from functools import partial

import diffusers
import transformers

from recipes.networks.tokenizer import build_tokenizer as build_clip_tokenizer
from tests.engine.family_parts import (
    CHAT,
    Parts,
    clip_text,
    flow,
    flux2_transformer,
    flux2_vae,
    kl_vae,
    language,
    marking_tokenizer,
    marks,
    mistral3,
    plain_tokenizer,
    processor_of,
    qwen3_vl,
    t5,
    wan_vae,
)


def bria() -> Parts:
    return {
        "transformer": diffusers.BriaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=[0, 4, 4],
        ),
        "scheduler": flow(),
        "vae": kl_vae(4),
        "text_encoder": t5(),
        "tokenizer": plain_tokenizer(),
    }


def bria_fibo() -> Parts:
    # its first token is one of Llama's vocabulary
    text = language(32) | {"vocab_size": 128_256, "num_key_value_heads": 1}
    text.pop("head_dim")
    return {
        "transformer": diffusers.BriaFiboTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=64,
            text_encoder_dim=32,
            axes_dims_rope=[0, 4, 4],
        ),
        "scheduler": flow(),
        "vae": wan_vae(
            out_channels=12, patch_size=2, scale_factor_spatial=16, in_channels=12, is_residual=True
        ),
        "text_encoder": transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**text)),
        "tokenizer": plain_tokenizer(),
    }


def bria_fibo2() -> Parts:
    return {
        "transformer": diffusers.BriaFibo2Transformer2DModel(
            in_channels=4,
            patch_size=2,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            cap_feat_dim=48,
            injection_layer_ids=(1,),
            perceiver_num_layers=1,
            min_num_gist_tokens=4,
            max_num_gist_tokens=8,
            gist_step=4,
            gist_min_text_len=4,
            gist_max_text_len=16,
            axes_dims=(4, 6, 6),
            axes_lens=(64, 64, 64),
        ),
        "scheduler": flow(),
        "vae": flux2_vae(),
        "text_encoder": qwen3_vl(layers=36),
        "processor": processor_of(),
    }


def chroma() -> Parts:
    return {
        "transformer": diffusers.ChromaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 8),
            approximator_hidden_dim=32,
            approximator_layers=1,
            approximator_num_channels=16,
        ),
        "scheduler": flow(),
        "vae": kl_vae(4),
        "text_encoder": t5(),
        "tokenizer": plain_tokenizer(),
    }


def cogview3() -> Parts:
    return {
        "transformer": diffusers.CogView3PlusTransformer2DModel(
            in_channels=4,
            num_layers=1,
            attention_head_dim=4,
            num_attention_heads=2,
            out_channels=4,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=2,
            pos_embed_max_size=64,
            sample_size=32,
        ),
        "scheduler": diffusers.CogVideoXDDIMScheduler(),
        "vae": kl_vae(4),
        "text_encoder": t5(),
        "tokenizer": plain_tokenizer(),
    }


def cogview4() -> Parts:
    return {
        "transformer": diffusers.CogView4Transformer2DModel(
            in_channels=4,
            num_layers=2,
            attention_head_dim=4,
            num_attention_heads=4,
            out_channels=4,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=4,
        ),
        "scheduler": flow(use_dynamic_shifting=True, time_shift_type="linear"),
        "vae": kl_vae(4),
        "text_encoder": transformers.GlmModel(transformers.GlmConfig(**language(32))),
        "tokenizer": marking_tokenizer(),
    }


def dreamlite() -> Parts:
    return {
        "unet": diffusers.DreamLiteUNetModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            down_block_types=("DreamLiteCrossAttnNoSelfAttnDownBlock2D",) * 2,
            up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
            block_out_channels=(16, 16),
            cross_attention_dim=16,
            attention_head_dim=8,
            layers_per_block=1,
            norm_num_groups=8,
            transformer_layers_per_block=1,
        ),
        "vae": diffusers.AutoencoderTiny(
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_encoder_blocks=(1, 1),
            num_decoder_blocks=(1, 1),
        ),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(),
        "tokenizer": plain_tokenizer(),
        "processor": processor_of(),
    }


def ernie() -> Parts:
    return {
        "transformer": diffusers.ErnieImageTransformer2DModel(
            hidden_size=32,
            num_attention_heads=2,
            num_layers=1,
            ffn_hidden_size=32,
            in_channels=16,
            out_channels=16,
            text_in_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
        "scheduler": flow(),
        "vae": flux2_vae(),
        "text_encoder": mistral3(2, "Mistral3Model"),
        "tokenizer": plain_tokenizer(),
    }


def flux2() -> Parts:
    return {
        "transformer": flux2_transformer(),
        "scheduler": flow(use_dynamic_shifting=True),
        "vae": flux2_vae(),
        # its layers 10, 20 and 30 are read
        "text_encoder": mistral3(31),
        "tokenizer": processor_of("PixtralProcessor"),
    }


def glm_image() -> Parts:
    text = language(32) | {
        "vocab_size": 1024,
        "vision_vocab_size": 128,
        "max_position_embeddings": 512,
    }
    text.pop("head_dim")
    config = transformers.GlmImageConfig(
        text_config=text | {"rope_parameters": {"mrope_section": (4, 2, 2)}},
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "image_size": 32,
            "patch_size": 8,
            "intermediate_size": 32,
        },
        vq_config={"embed_dim": 32, "num_embeddings": 128, "latent_channels": 32},
        image_token_id=marks()["image_token_id"],
    )
    vae = kl_vae(4, num_blocks=4)
    vae.register_to_config(latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    reader = transformers.GlmImageForConditionalGeneration(config)
    reader.generation_config.eos_token_id = None
    tokenizer = plain_tokenizer()
    tokenizer._set_model_specific_special_tokens(
        {
            "image_token": "<|image_pad|>",
            "grid_bos_token": "<|vision_start|>",
            "grid_eos_token": "<|vision_end|>",
            "bos_token": "<end>",
        }
    )
    images = transformers.GlmImageImageProcessorPil()
    return {
        "tokenizer": marking_tokenizer(),
        "processor": transformers.GlmImageProcessor(images, tokenizer, chat_template=CHAT),
        "text_encoder": t5(),
        "vision_language_encoder": reader,
        "vae": vae,
        "transformer": diffusers.GlmImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            text_embed_dim=32,
            time_embed_dim=16,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=128,
        ),
        "scheduler": flow(),
    }


def hidream() -> Parts:
    clip = partial(clip_text, 32, "CLIPTextModelWithProjection", max_position_embeddings=128)
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**language(16)))
    return {
        "transformer": diffusers.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=[32, 16],
            text_emb_dim=64,
            num_routed_experts=4,
            num_activated_experts=2,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(64, 64),
            llama_layers=(0, 1),
        ),
        "scheduler": flow(),
        "vae": kl_vae(4),
        "text_encoder": clip(),
        "tokenizer": build_clip_tokenizer(),
        "text_encoder_2": clip(),
        "tokenizer_2": build_clip_tokenizer(),
        "text_encoder_3": t5(),
        "tokenizer_3": plain_tokenizer(),
        "text_encoder_4": llama,
        "tokenizer_4": plain_tokenizer(),
    }


def hunyuan_dit() -> Parts:
    tokens = len(plain_tokenizer())
    bert = transformers.BertConfig(
        vocab_size=tokens,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
    )
    return {
        "transformer": diffusers.HunyuanDiT2DModel(
            sample_size=32,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            in_channels=4,
            cross_attention_dim=24,
            cross_attention_dim_t5=32,
            pooled_projection_dim=16,
            hidden_size=24,
        ),
        "vae": kl_vae(4, num_blocks=4),
        "scheduler": diffusers.DDPMScheduler(),
        "text_encoder": transformers.BertModel(bert),
        "tokenizer": plain_tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": plain_tokenizer(),
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }


def deep_floyd() -> Parts:
    return {
        "unet": diffusers.UNet2DConditionModel(
            sample_size=64,
            layers_per_block=1,
            block_out_channels=(32, 64),
            down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
            mid_block_type="UNetMidBlock2DSimpleCrossAttn",
            up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
            in_channels=3,
            out_channels=6,
            cross_attention_dim=32,
            encoder_hid_dim=32,
            attention_head_dim=8,
            addition_embed_type="text",
            addition_embed_type_num_heads=2,
            cross_attention_norm="group_norm",
            resnet_time_scale_shift="scale_shift",
            act_fn="gelu",
        ),
        "scheduler": diffusers.DDPMScheduler(variance_type="learned_range", thresholding=True),
        "text_encoder": t5(),
        "tokenizer": plain_tokenizer(),
        "safety_checker": None,
        "feature_extractor": None,
        "watermarker": None,
        "requires_safety_checker": False,
    }
