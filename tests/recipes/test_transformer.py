"""The transformer's training sees what diffusers' Stable Diffusion 3 pipeline sees."""

import random
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from diffusers import AutoencoderTiny, StableDiffusion3Pipeline
from transformers import CLIPTextModel

from ray_cluster.quality.render import object_distance, place
from ray_cluster.quality.scenes import BACKGROUNDS, COLOURS, SHAPES, sample_training_scene
from recipes.export import with_projection
from recipes.networks.auxiliary_head import TransformerWithHead, label_tokens
from recipes.networks.text_encoder import build_text_encoder
from recipes.networks.tokenizer import build_tokenizer
from recipes.networks.transformer import (
    ZERO_TOKENS,
    CountedLastToken,
    build_flow_scheduler,
    build_transformer,
    draw_noise_levels,
    encode_for_transformer,
)
from recipes.recipe import TextRecipe, TransformerRecipe

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
    generator = torch.Generator().manual_seed(3)
    levels = draw_noise_levels(4000, recipe.first, recipe.level_spread, generator)
    assert float(levels.min()) > 0
    assert float(levels.max()) < 1
    assert 0.45 < float((levels > 0.6).float().mean()) < 0.6


@pytest.mark.parametrize(("columns", "rows"), [(8, 8), (12, 8), (8, 16)])
def test_tokens_are_labelled_with_what_the_renderer_paints_there(columns: int, rows: int) -> None:
    rng = random.Random(5)
    scenes = [sample_training_scene(rng, single_share=0.5) for _ in range(40)]
    placed = place(scenes, width=8 * columns, height=8 * rows)
    labels = label_tokens(placed, columns=columns, rows=rows)
    # distance of the token's middle to each object's outline, at the token's resolution
    distance = object_distance(placed, width=columns, height=rows).flatten(2)
    for index, scene in enumerate(scenes):
        assert BACKGROUNDS[int(labels.background[index, 0])] == scene.background
        for number, thing in enumerate(scene.objects):
            inside = distance[index, number] < 0
            assert {SHAPES[k - 1] for k in labels.shape[index][inside]} <= {thing.shape}
            assert {COLOURS[k - 1] for k in labels.colour[index][inside]} <= {thing.colour}
            # the offset leads to the object's middle, and tells how large it is
            size = placed.radius[index, number] * min(columns, rows)
            offset = labels.offset[index][inside]
            assert torch.allclose(offset[:, 2], size.expand(len(offset)))
            nearest = labels.offset[index, :, :2].abs().amax(-1)
            assert bool((nearest[labels.shape[index] > 0] < 1.2).all())
        free = (distance[index] > 0.25).all(0)
        assert not labels.shape[index][free].any()
    assert 0.02 < float((labels.shape > 0).float().mean()) < 0.5


def test_the_reader_reads_the_pictures_tokens_and_trains_the_layers_before_it_only() -> None:
    recipe = replace(TransformerRecipe(), layers=3, heads=2, head_width=8)
    transformer = build_transformer(recipe, latent_channels=16, text_width=16)
    model = TransformerWithHead(transformer, layer=2)
    placed = place([sample_training_scene(random.Random(1), 1.0)] * 2, width=96, height=64)
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(2, 16, 16, 24),
        "encoder_hidden_states": torch.randn(2, 33, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([900.0, 100.0]),
    }
    predicted, read = model(**inputs)
    assert predicted.shape == (2, 16, 16, 24)
    labels = label_tokens(placed, columns=12, rows=8)
    assert read.shape[:2] == labels.shape.shape == (2, 96)
    error = model.head_error(read, labels)
    error.backward()
    with_gradient = [
        any(w.grad is not None and bool(w.grad.abs().sum() > 0) for w in block.parameters())
        for block in transformer.transformer_blocks
    ]
    assert with_gradient == [True, True, False]

    perfect = torch.full_like(read, -30.0)
    for token_row in range(2):
        for token in range(96):
            shape = int(labels.shape[token_row, token])
            colour = int(labels.colour[token_row, token])
            background = int(labels.background[token_row, token])
            places = [shape, 1 + len(SHAPES) + colour, 2 + len(SHAPES) + len(COLOURS) + background]
            perfect[token_row, token, places] = 30.0
    perfect[..., -3:] = labels.offset
    assert float(model.head_error(perfect, labels)) < 1e-5
    assert float(error.detach()) > 1
