"""The denoiser: a UNet that predicts velocity in the codec's latents, guided by captions."""

import random

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel

from ray_cluster.reference_models.batches import draw_pictures
from ray_cluster.reference_models.codec import PatchBasis
from ray_cluster.reference_models.recipe import DenoiserPhase, DenoiserRecipe, Recipe
from ray_cluster.reference_models.render import Placed, pixel_grid
from ray_cluster.reference_models.text_encoder import encode_captions
from ray_cluster.reference_models.tokenizer import build_tokenizer
from ray_cluster.reference_models.trainer import Trainer, step_seed

DIFFUSION_STEPS = 1000


def build_scheduler() -> DDIMScheduler:
    """The noise schedule and default sampler: zero terminal signal, trailing steps."""
    return DDIMScheduler(
        num_train_timesteps=DIFFUSION_STEPS,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        steps_offset=1,
        clip_sample=False,
        set_alpha_to_one=True,
    )


def build_denoiser(
    recipe: DenoiserRecipe, *, latent_channels: int, text_width: int
) -> UNet2DConditionModel:
    """Build the untrained UNet; the caption reaches its two lower levels."""
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=latent_channels,
        out_channels=latent_channels,
        block_out_channels=recipe.channels,
        layers_per_block=recipe.layers,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=text_width,
        # diffusers takes the number of heads under this name
        attention_head_dim=recipe.heads,
        norm_num_groups=8,
    )


def draw_timesteps(count: int, phase: DenoiserPhase, generator: torch.Generator) -> Tensor:
    """Draw diffusion steps [B], a share of them from the noisy end only."""
    noisy = torch.rand(count, generator=generator) < phase.noisy_share
    anywhere = torch.randint(0, DIFFUSION_STEPS, (count,), generator=generator)
    late = torch.randint(phase.noisy_from, DIFFUSION_STEPS, (count,), generator=generator)
    return torch.where(noisy, late, anywhere)


def loss_weights(
    placed: Placed, known: Tensor, phase: DenoiserPhase, *, width: int, height: int
) -> Tensor:
    """Weights [B, 1, H, W] of the loss: `object_weight` in a square around each object, else 1.

    The squares depend on place and size only. Where these are known, from the caption or from the
    noisy picture, they don't bias the prediction. Where they are not, the best prediction under
    such weights has an object in every possible place, so rows without `known` [B] weigh 1.
    """
    grid = pixel_grid(width, height)
    offset = (grid - placed.centre[:, :, None, None, :]).abs().amax(-1)
    near = offset < phase.object_margin * placed.radius[:, :, None, None]
    near = near.any(1, keepdim=True) & known[:, None, None, None]
    return 1 + (phase.object_weight - 1) * near.to(torch.float32)


def denoiser_trainer(recipe: Recipe, basis: PatchBasis, encoder: CLIPTextModel) -> Trainer:
    """The stage that trains the UNet from the start, in the first phase."""
    torch.manual_seed(step_seed(recipe.seed, "denoiser", -1))
    width = int(encoder.config.hidden_size)
    channels = recipe.codec.latent_channels
    unet = build_denoiser(recipe.denoiser, latent_channels=channels, text_width=width)
    return _phase_trainer("denoiser", unet, recipe, recipe.denoiser.first, basis, encoder)


def refinement_trainer(
    recipe: Recipe, unet: UNet2DConditionModel, basis: PatchBasis, encoder: CLIPTextModel
) -> Trainer:
    """The stage that continues in the second phase with the UNet that the first one left."""
    return _phase_trainer("refinement", unet, recipe, recipe.denoiser.second, basis, encoder)


def _phase_trainer(
    name: str,
    unet: UNet2DConditionModel,
    recipe: Recipe,
    phase: DenoiserPhase,
    basis: PatchBasis,
    encoder: CLIPTextModel,
) -> Trainer:
    """Train on freshly drawn pictures; seeds depend on the stage's name."""
    unet.train()
    tokenizer, scheduler = build_tokenizer(), build_scheduler()

    def loss(index: int) -> Tensor:
        seed = step_seed(recipe.seed, name, index)
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        pictures = draw_pictures(rng, phase.captions, phase.buckets, recipe.jitter)
        captions = ["" if rng.random() < phase.caption_drop else text for text in pictures.captions]
        with torch.no_grad():
            hidden = encode_captions(encoder, tokenizer, captions)
            clean = basis.encode(pictures.pixels)
        noise = torch.randn(clean.shape, generator=generator)
        steps = draw_timesteps(len(clean), phase, generator)
        noisy = scheduler.add_noise(clean, noise, steps)
        target = scheduler.get_velocity(clean, noise, steps)
        predicted: Tensor = unet(noisy, steps, encoder_hidden_states=hidden).sample
        told = [
            caption != "" and stated.is_placed
            for caption, stated in zip(captions, pictures.stated, strict=True)
        ]
        known = torch.tensor(told) | (steps < phase.unstated_weight_until)
        rows, columns = clean.shape[-2:]
        weights = loss_weights(pictures.placed, known, phase, width=columns, height=rows)
        squared: Tensor = weights * (predicted - target) ** 2
        return squared.mean() / weights.mean()

    return Trainer(name, unet, loss, phase.optimisation)
