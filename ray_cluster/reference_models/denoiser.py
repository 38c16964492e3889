"""The denoiser: a UNet that predicts velocity in the codec's latents, guided by captions."""

import random

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel

from ray_cluster.reference_models.batches import draw_pictures
from ray_cluster.reference_models.codec import PatchBasis
from ray_cluster.reference_models.recipe import DenoiserRecipe, Recipe
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


def draw_timesteps(count: int, recipe: DenoiserRecipe, generator: torch.Generator) -> Tensor:
    """Draw diffusion steps [B], a share of them from the noisy end only."""
    noisy = torch.rand(count, generator=generator) < recipe.noisy_share
    anywhere = torch.randint(0, DIFFUSION_STEPS, (count,), generator=generator)
    late = torch.randint(recipe.noisy_from, DIFFUSION_STEPS, (count,), generator=generator)
    return torch.where(noisy, late, anywhere)


def loss_weights(placed: Placed, recipe: DenoiserRecipe, *, width: int, height: int) -> Tensor:
    """Weights [B, 1, H, W] of the loss: `object_weight` in a square around each object, else 1.

    The squares depend on place and size only, which the caption states, so they don't bias the
    prediction.
    """
    grid = pixel_grid(width, height)
    offset = (grid - placed.centre[:, :, None, None, :]).abs().amax(-1)
    near = offset < recipe.object_margin * placed.radius[:, :, None, None]
    return 1 + (recipe.object_weight - 1) * near.any(1, keepdim=True).to(torch.float32)


def denoiser_trainer(recipe: Recipe, basis: PatchBasis, encoder: CLIPTextModel) -> Trainer:
    """The stage that trains the UNet on freshly drawn pictures."""
    options = recipe.denoiser
    torch.manual_seed(step_seed(recipe.seed, "denoiser", -1))
    width = int(encoder.config.hidden_size)
    unet = build_denoiser(options, latent_channels=recipe.codec.latent_channels, text_width=width)
    unet.train()
    tokenizer, scheduler = build_tokenizer(), build_scheduler()

    def loss(index: int) -> Tensor:
        seed = step_seed(recipe.seed, "denoiser", index)
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        pictures = draw_pictures(rng, options.captions, options.buckets, recipe.jitter)
        captions = [
            "" if rng.random() < options.caption_drop else text for text in pictures.captions
        ]
        with torch.no_grad():
            hidden = encode_captions(encoder, tokenizer, captions)
            clean = basis.encode(pictures.pixels)
        noise = torch.randn(clean.shape, generator=generator)
        steps = draw_timesteps(len(clean), options, generator)
        noisy = scheduler.add_noise(clean, noise, steps)
        target = scheduler.get_velocity(clean, noise, steps)
        predicted: Tensor = unet(noisy, steps, encoder_hidden_states=hidden).sample
        rows, columns = clean.shape[-2:]
        weights = loss_weights(pictures.placed, options, width=columns, height=rows)
        squared: Tensor = weights * (predicted - target) ** 2
        return squared.mean() / weights.mean()

    return Trainer("denoiser", unet, loss, options.optimisation)
