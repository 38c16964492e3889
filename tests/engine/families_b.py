"""Families of diffusers' pipelines with small random weights, the second half of the alphabet."""

from __future__ import annotations

import diffusers
import transformers

from recipes.networks.tokenizer import build_tokenizer as build_clip_tokenizer
from tests.engine.family_parts import (
    Parts,
    clip_text,
    dc_vae,
    flow,
    gemma2,
    kl_vae,
    language,
    marking_tokenizer,
    pixart_transformer,
    plain_tokenizer,
    processor_of,
    qwen3_vl,
    sana_transformer,
    t5,
)
from tests.engine.random_pipelines import qwen_parts


def kandinsky3() -> Parts:
    down, up = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    return {
        "unet": diffusers.Kandinsky3UNet(
            time_embedding_dim=4,
            groups=2,
            attention_head_dim=4,
            block_out_channels=(32, 64),
            cross_attention_dim=4,
            encoder_hid_dim=32,
        ),
        "movq": diffusers.VQModel(
            block_out_channels=(32, 32, 32, 32),
            norm_num_groups=8,
            mid_block_add_attention=False,
            down_block_types=down,
            up_block_types=up,
            num_vq_embeddings=12,
            vq_embed_dim=4,
            latent_channels=4,
            norm_type="spatial",
        ),
        "scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
        "text_encoder": t5(),
        "tokenizer": marking_tokenizer(),
    }


def kandinsky5(*, looks: bool = False) -> Parts:
    whole = qwen_parts()
    return {
        "transformer": diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=16,
            in_text_dim=16,
            in_text_dim2=32,
            time_dim=16,
            out_visual_dim=16,
            patch_size=(1, 2, 2),
            model_dim=16,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=1,
            axes_dims=(1, 1, 2),
            visual_cond=looks,
            attention_type="regular",
        ),
        "vae": kl_vae(16, num_blocks=4),
        "scheduler": flow(),
        "text_encoder": whole["text_encoder"],
        "tokenizer": processor_of("Qwen2VLProcessor"),
        "text_encoder_2": clip_text(32, max_position_embeddings=77),
        "tokenizer_2": build_clip_tokenizer(),
    }


def krea2() -> Parts:
    return {
        "transformer": diffusers.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=32,
            timestep_embed_dim=8,
            text_hidden_dim=16,
            num_text_layers=3,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=16,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 2, 2),
            rope_theta=1000.0,
        ),
        "vae": qwen_parts()["vae"],
        "scheduler": flow(use_dynamic_shifting=True),
        "text_encoder": qwen3_vl("Qwen3VLModel"),
        "tokenizer": plain_tokenizer(),
        "text_encoder_select_layers": (0, 1, 2),
    }


def longcat() -> Parts:
    return {
        "transformer": diffusers.LongCatImageTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            pooled_projection_dim=16,
            axes_dims_rope=[4, 4, 8],
        ),
        "vae": kl_vae(16),
        "scheduler": flow(use_dynamic_shifting=True),
        "text_encoder": qwen_parts()["text_encoder"],
        "tokenizer": plain_tokenizer(),
        "text_processor": processor_of("Qwen2VLProcessor"),
    }


def lumina() -> Parts:
    return {
        "transformer": diffusers.LuminaNextDiT2DModel(
            hidden_size=24,
            num_layers=2,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            cross_attention_dim=8,
        ),
        "vae": kl_vae(4, num_blocks=4),
        "scheduler": flow(),
        "text_encoder": transformers.GemmaModel(transformers.GemmaConfig(**language(8))),
        "tokenizer": marking_tokenizer(),
    }


def lumina2() -> Parts:
    return {
        "transformer": diffusers.Lumina2Transformer2DModel(
            in_channels=4,
            hidden_size=24,
            num_layers=1,
            num_refiner_layers=1,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=2,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(512, 128, 128),
            cap_feat_dim=8,
        ),
        "vae": kl_vae(4, num_blocks=4),
        "scheduler": flow(),
        "text_encoder": gemma2(),
        "tokenizer": plain_tokenizer(),
    }


def nucleus() -> Parts:
    return {
        "transformer": diffusers.NucleusMoEImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
            moe_enabled=False,
            capacity_factors=[8.0, 8.0],
        ),
        "vae": qwen_parts()["vae"],
        "scheduler": flow(),
        "text_encoder": qwen3_vl(layers=8),
        "processor": processor_of(),
    }


def ovis() -> Parts:
    return {
        "transformer": diffusers.OvisImageTransformer2DModel(
            in_channels=16,
            out_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(4, 4, 8),
        ),
        "vae": kl_vae(4),
        "scheduler": flow(use_dynamic_shifting=True),
        "text_encoder": transformers.Qwen3Model(transformers.Qwen3Config(**language(16))),
        "tokenizer": plain_tokenizer(),
    }


def pixart_alpha() -> Parts:
    return {
        "transformer": pixart_transformer(),
        "vae": kl_vae(4),
        "scheduler": diffusers.DPMSolverMultistepScheduler(),
        "text_encoder": t5(),
        "tokenizer": plain_tokenizer(),
    }


def qwen21() -> Parts:
    return {
        "transformer": diffusers.QwenImage21Transformer2DModel(
            patch_size=1,
            in_channels=8,
            out_channels=8,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            context_in_dim=16,
            mlp_ratio=2,
            axes_dims_rope=(4, 6, 6),
        ),
        "vae": diffusers.AutoencoderKLQwenImage21(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=8,
            dim_mult=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            attn_scales=[],
            temperal_downsample=[False, True, True, True],
            latents_mean=[0.0] * 8,
            latents_std=[1.0] * 8,
        ),
        "scheduler": flow(),
        "text_encoder": qwen3_vl(),
        "processor": processor_of(),
    }


def sana_sprint() -> Parts:
    return {
        "transformer": sana_transformer(qk_norm="rms_norm_across_heads", guidance_embeds=True),
        "vae": dc_vae(),
        "scheduler": diffusers.SCMScheduler(),
        "text_encoder": gemma2(),
        "tokenizer": plain_tokenizer(),
    }


def hunyuan_image(is_distilled: bool = False) -> Parts:
    guider = None if is_distilled else diffusers.AdaptiveProjectedMixGuidance()
    return {
        "transformer": diffusers.HunyuanImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=4,
            attention_head_dim=8,
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            patch_size=(1, 1),
            guidance_embeds=is_distilled,
            text_embed_dim=16,
            text_embed_2_dim=32,
            rope_axes_dim=(4, 4),
        ),
        "vae": diffusers.AutoencoderKLHunyuanImage(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            block_out_channels=(32, 32, 32, 32),
            layers_per_block=1,
            spatial_compression_ratio=8,
            sample_size=128,
            scaling_factor=0.5,
        ),
        "scheduler": flow(shift=7.0),
        "text_encoder": qwen_parts()["text_encoder"],
        "tokenizer": plain_tokenizer(),
        "text_encoder_2": t5(),
        "tokenizer_2": plain_tokenizer(),
        "guider": guider,
        "ocr_guider": guider,
    }


def z_image_omni() -> Parts:
    siglip = transformers.Siglip2VisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        patch_size=16,
        num_patches=64,
    )
    return {
        "transformer": diffusers.ZImageTransformer2DModel(
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=16,
            siglip_feat_dim=16,
            axes_dims=[8, 4, 4],
            axes_lens=[1024, 128, 128],
        ),
        "vae": kl_vae(16),
        "scheduler": flow(),
        "text_encoder": transformers.Qwen3Model(transformers.Qwen3Config(**language(16))),
        "tokenizer": plain_tokenizer(),
        "siglip": transformers.Siglip2VisionModel(siglip),
        "siglip_processor": transformers.Siglip2ImageProcessorPil(patch_size=16),
    }


def amused() -> Parts:
    return {
        "transformer": diffusers.UVit2DModel(
            hidden_size=8,
            cond_embed_dim=32,
            micro_cond_encode_dim=2,
            micro_cond_embed_dim=10,
            encoder_hidden_size=32,
            vocab_size=32,
            codebook_size=8,
            in_channels=8,
            block_out_channels=8,
            num_res_blocks=1,
            downsample=True,
            upsample=True,
            block_num_heads=1,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=16,
        ),
        "vqvae": diffusers.VQModel(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=8,
            norm_num_groups=8,
            num_vq_embeddings=8,
            mid_block_add_attention=False,
            lookup_from_codebook=True,
        ),
        "scheduler": diffusers.AmusedScheduler(mask_token_id=31),
        "text_encoder": clip_text(32, "CLIPTextModelWithProjection", max_position_embeddings=77),
        "tokenizer": build_clip_tokenizer(),
    }
