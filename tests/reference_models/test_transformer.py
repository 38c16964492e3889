"""The transformer's training sees what diffusers' Stable Diffusion 3 pipeline sees."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from diffusers import AutoencoderTiny, StableDiffusion3Pipeline
from transformers import CLIPTextModel

from ray_cluster.reference_models.export import with_projection
from ray_cluster.reference_models.recipe import TextRecipe, TransformerRecipe
from ray_cluster.reference_models.text_encoder import build_text_encoder
from ray_cluster.reference_models.tokenizer import build_tokenizer
from ray_cluster.reference_models.transformer import (
    ZERO_TOKENS,
    CountedLastToken,
    build_flow_scheduler,
    build_transformer,
    draw_noise_levels,
    encode_for_transformer,
)

CAPTIONS = ("a red circle", "a blue star left of a green ring on a white background", "")


@pytest.fixture
def encoder() -> CLIPTextModel:
    torch.manual_seed(1)
    return build_text_encoder(replace(TextRecipe(), width=16, heads=2)).eval()


@pytest.fixture
def pipeline(encoder: CLIPTextModel) -> StableDiffusion3Pipeline:
    projected = with_projection(encoder)
    recipe = replace(TransformerRecipe(), layers=2, heads=2, head_width=8)
    transformer = build_transformer(recipe, latent_channels=16, text_width=16).eval()
    with torch.no_grad():
        for weights in transformer.parameters():
            weights.add_(0.2 * torch.randn_like(weights))
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=build_flow_scheduler(),
        vae=AutoencoderTiny(latent_channels=16),
        text_encoder=projected,
        tokenizer=build_tokenizer(),
        text_encoder_2=projected,
        tokenizer_2=build_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def call(pipeline: StableDiffusion3Pipeline, hidden: torch.Tensor, pooled: torch.Tensor) -> Any:
    noise = torch.randn(len(CAPTIONS), 16, 16, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return pipeline.transformer(
            hidden_states=noise,
            encoder_hidden_states=hidden,
            pooled_projections=pooled,
            timestep=torch.tensor([900.0, 500.0, 20.0]),
        ).sample


def test_one_counted_zero_does_what_the_pipelines_256_do(
    pipeline: StableDiffusion3Pipeline, encoder: CLIPTextModel
) -> None:
    hidden, _, pooled, _ = pipeline.encode_prompt(
        list(CAPTIONS), None, None, max_sequence_length=256
    )
    assert hidden.shape[1] == 32 + ZERO_TOKENS
    wanted = call(pipeline, hidden, pooled)
    mine, mine_pooled = encode_for_transformer(encoder, build_tokenizer(), CAPTIONS)
    assert mine.shape[1] == 33
    uncounted = call(pipeline, mine, mine_pooled)
    for block in pipeline.transformer.transformer_blocks:
        cast(Any, block).attn.processor = CountedLastToken()
    counted = call(pipeline, mine, mine_pooled)
    assert (counted - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert (uncounted - wanted).abs().max() > 1e-2 * wanted.abs().max()


def test_noise_levels_lie_within_the_schedule_and_more_of_them_near_its_noisy_end() -> None:
    recipe = TransformerRecipe()
    levels = draw_noise_levels(4000, recipe, torch.Generator().manual_seed(3))
    assert float(levels.min()) > 0
    assert float(levels.max()) < 1
    assert 0.45 < float((levels > 0.6).float().mean()) < 0.6
