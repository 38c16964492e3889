"""The diffusion transformer: Stable Diffusion 3's class, trained by flow matching.

Stable Diffusion 3's pipeline appends 256 zero vectors to a caption's encoding when there is no T5
encoder. They carry no position, so in every layer they stay equal to each other: one of them, which
attention counts 256 times, does the same at a fifth of the cost. Training uses that one.
"""

import math
from typing import Any, cast

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from torch import Tensor
from transformers import CLIPTextModel, PreTrainedTokenizerFast

from recipes.networks.auxiliary_head import TransformerWithHead, label_tokens
from recipes.networks.codec import load_basis
from recipes.networks.denoiser import draw_step, weighted_error
from recipes.networks.text_encoder import trained_text_encoder
from recipes.networks.tokenizer import build_tokenizer, tokenise
from recipes.recipe import DenoiserPhase, TransformerRecipe
from recipes.runs import TrainingRun
from recipes.trainer import Trainer, step_seed

DIFFUSION_STEPS = 1000
# the pipeline's `max_sequence_length`
ZERO_TOKENS = 256


def build_flow_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The noise schedule and default sampler: rectified flow, steps evenly spaced in noise."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=DIFFUSION_STEPS, shift=1.0)


def build_transformer(
    recipe: TransformerRecipe, *, latent_channels: int, text_width: int
) -> SD3Transformer2DModel:
    """Build the untrained transformer; both CLIP encoders of the pipeline are the same network."""
    width = recipe.heads * recipe.head_width
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=recipe.patch,
        in_channels=latent_channels,
        out_channels=latent_channels,
        num_layers=recipe.layers,
        attention_head_dim=recipe.head_width,
        num_attention_heads=recipe.heads,
        joint_attention_dim=2 * text_width,
        caption_projection_dim=width,
        pooled_projection_dim=2 * text_width,
        pos_embed_max_size=recipe.largest_grid,
        qk_norm="rms_norm",
    )


def encode_for_transformer(
    encoder: CLIPTextModel, tokenizer: PreTrainedTokenizerFast, captions: tuple[str, ...]
) -> tuple[Tensor, Tensor]:
    """Encode captions as the pipeline does, with one zero vector for all.

    Returns:
        Encodings [B, 33, 2 * width] of the last layer but one, and pooled ones [B, 2 * width].
    """
    ids = tokenise(tokenizer, captions).to(encoder.device)
    output = encoder(ids, output_hidden_states=True)
    hidden, pooled = output.hidden_states[-2], output.pooler_output
    twice = torch.cat([hidden, hidden], -1)
    return torch.cat([twice, torch.zeros_like(twice[:, :1])], 1), torch.cat([pooled, pooled], -1)


class CountedLastToken:
    """Joint attention in which the caption's last token counts `count` times."""

    def __init__(self, count: int = ZERO_TOKENS) -> None:
        self.bias = math.log(count)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend from pictures' and captions' tokens, [B, N, C] and [B, M, C], to all of them."""
        del attention_mask
        queries = _heads(attn, attn.to_q(hidden_states), attn.norm_q)
        keys = _heads(attn, attn.to_k(hidden_states), attn.norm_k)
        values = _heads(attn, attn.to_v(hidden_states), None)
        added_queries = _heads(attn, attn.add_q_proj(encoder_hidden_states), attn.norm_added_q)
        added_keys = _heads(attn, attn.add_k_proj(encoder_hidden_states), attn.norm_added_k)
        added_values = _heads(attn, attn.add_v_proj(encoder_hidden_states), None)
        every_query = torch.cat([queries, added_queries], 2)
        every_key = torch.cat([keys, added_keys], 2)
        # plain products: torch's fused attention is slow backwards in bfloat16 on a CPU
        scores = (every_query * queries.shape[-1] ** -0.5) @ every_key.transpose(-1, -2)
        counts = scores.new_zeros(scores.shape[-1])
        counts[-1] = self.bias
        shares = torch.softmax(scores + counts, -1)
        mixed = shares.to(values.dtype) @ torch.cat([values, added_values], 2)
        joined = mixed.transpose(1, 2).flatten(2)
        pictures, captions = joined.split(
            [hidden_states.shape[1], encoder_hidden_states.shape[1]], 1
        )
        if not attn.context_pre_only:
            captions = attn.to_add_out(captions)
        return attn.to_out[1](attn.to_out[0](pictures)), captions


def draw_noise_levels(
    count: int, phase: DenoiserPhase, spread: float, generator: torch.Generator
) -> Tensor:
    """Draw noise levels [B] in 0..1: logit-normal ones, and a share from the noisy end only."""
    noisy = torch.rand(count, generator=generator) < phase.noisy_share
    anywhere = torch.sigmoid(spread * torch.randn(count, generator=generator))
    least = phase.noisy_from / DIFFUSION_STEPS
    late = least + (1 - least) * torch.rand(count, generator=generator)
    return torch.where(noisy, late, anywhere)


def new_transformer(run: TrainingRun, stage: str) -> TransformerWithHead:
    """Build the untrained transformer and the head that reads its middle layer."""
    torch.manual_seed(step_seed(run.recipe.seed, stage, -1))
    recipe = run.recipe.transformer
    transformer = build_transformer(
        recipe, latent_channels=recipe.codec.latent_channels, text_width=run.recipe.text.width
    )
    counted = CountedLastToken()
    for block in transformer.transformer_blocks:
        cast(Any, block).attn.processor = counted
    return TransformerWithHead(transformer, recipe.head_layer)


def transformer_trainer(
    stage: str, run: TrainingRun, phase: DenoiserPhase, model: TransformerWithHead
) -> Trainer:
    """A stage that trains the transformer to predict noise minus picture."""
    recipe = run.recipe.transformer
    model = model.to(run.device).train()
    encoder, basis = trained_text_encoder(run), load_basis(run, recipe.codec)
    tokenizer = build_tokenizer()

    def loss(index: int) -> Tensor:
        drawn = draw_step(stage, run, phase, index)
        with torch.no_grad():
            hidden, pooled = encode_for_transformer(encoder, tokenizer, drawn.captions)
            clean = basis.encode(drawn.pictures.pixels)
        noise = run.draw_noise(clean.shape, drawn.generator)
        levels = draw_noise_levels(len(clean), phase, recipe.level_spread, drawn.generator)
        share = levels.to(run.device)[:, None, None, None]
        # twice as fast on CPUs that multiply bfloat16; the weights and the loss stay float32
        with torch.autocast(run.device.type, torch.bfloat16):
            predicted, read = model(
                hidden_states=(1 - share) * clean + share * noise,
                encoder_hidden_states=hidden,
                pooled_projections=pooled,
                timestep=levels.to(run.device) * DIFFUSION_STEPS,
            )
        known = drawn.is_stated | (levels * DIFFUSION_STEPS < phase.unstated_weight_until)
        placed = drawn.pictures.placed
        rows, columns = (side // recipe.patch for side in clean.shape[-2:])
        labels = label_tokens(placed, columns=columns, rows=rows)
        error = weighted_error(predicted.float(), noise - clean, placed, known, phase)
        return error + recipe.head_weight * model.head_error(read.float(), labels)

    return Trainer(stage, model, loss, phase.optimisation)


def _heads(attn: Any, projected: Tensor, norm: Any) -> Tensor:
    """[B, N, C] to [B, heads, N, C / heads], normalised where the module says so."""
    split = projected.unflatten(2, (attn.heads, -1)).transpose(1, 2)
    return cast(Tensor, split if norm is None else norm(split))
