"""The denoiser, a UNet that predicts velocity in the codec's latents, and LoRAs of it."""

import random
from dataclasses import dataclass
from typing import cast

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from peft import LoraConfig
from torch import Tensor

from ray_cluster.quality.render import Jitter, Placed, pixel_grid
from ray_cluster.quality.scenes import Style
from recipes.batches import Pictures, draw_pictures
from recipes.networks.codec import load_basis
from recipes.networks.text_encoder import encode_captions, trained_text_encoder
from recipes.networks.tokenizer import build_tokenizer
from recipes.recipe import DenoiserPhase, LoraRecipe, UNetSize
from recipes.runs import TrainingRun
from recipes.trainer import Trainer, step_seed

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
    size: UNetSize, *, latent_channels: int, text_width: int
) -> UNet2DConditionModel:
    """Build the untrained UNet; the caption reaches its two lower levels."""
    return UNet2DConditionModel(
        sample_size=16,
        in_channels=latent_channels,
        out_channels=latent_channels,
        block_out_channels=size.channels,
        layers_per_block=size.layers,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=text_width,
        # diffusers takes the number of heads under this name
        attention_head_dim=size.heads,
        norm_num_groups=8,
    )


def draw_timesteps(count: int, phase: DenoiserPhase, generator: torch.Generator) -> Tensor:
    """Draw diffusion steps [B]: anywhere, from the noisy end, or from those a sampler takes."""
    noisy = torch.rand(count, generator=generator) < phase.noisy_share
    anywhere = torch.randint(0, DIFFUSION_STEPS, (count,), generator=generator)
    late = torch.randint(phase.noisy_from, DIFFUSION_STEPS, (count,), generator=generator)
    drawn = torch.where(noisy, late, anywhere)
    if not phase.steps_used:
        return drawn
    used = torch.tensor(phase.steps_used)
    picked = used[torch.randint(len(used), (count,), generator=generator)]
    is_used = ~noisy & (torch.rand(count, generator=generator) < phase.used_share)
    return torch.where(is_used, picked, drawn)


def loss_weights(
    placed: Placed, known: Tensor, phase: DenoiserPhase, *, width: int, height: int
) -> Tensor:
    """Weights [B, 1, H, W] of the loss: `object_weight` in a square around each object, else 1.

    The squares depend on place and size only. Where these are known, from the caption or from the
    noisy picture, they don't bias the prediction. Where they are not, the best prediction under
    such weights has an object in every possible place, so rows without `known` [B] weigh 1.
    """
    grid = pixel_grid(width, height, placed.radius.device)
    offset = (grid - placed.centre[:, :, None, None, :]).abs().amax(-1)
    near = offset < phase.object_margin * placed.radius[:, :, None, None]
    near = near.any(1, keepdim=True) & known[:, None, None, None]
    return 1 + (phase.object_weight - 1) * near.to(torch.float32)


def base_unet(run: TrainingRun) -> UNet2DConditionModel:
    """The UNet of the model that the run builds on.

    Raises:
        FileNotFoundError: it builds on none.
    """
    if run.base is None:
        raise FileNotFoundError(f"the run in {run.folder.path} needs a finished UNet: give --base")
    return cast(UNet2DConditionModel, UNet2DConditionModel.from_pretrained(run.base / "unet"))


def new_unet(run: TrainingRun, stage: str, size: UNetSize) -> UNet2DConditionModel:
    """Build the untrained UNet of a stage, with the stage's seed."""
    torch.manual_seed(step_seed(run.recipe.seed, stage, -1))
    channels = run.recipe.codec.latent_channels
    return build_denoiser(size, latent_channels=channels, text_width=run.recipe.text.width)


def unet_trainer(
    stage: str,
    run: TrainingRun,
    phase: DenoiserPhase,
    unet: UNet2DConditionModel,
    style: Style = "plain",
) -> Trainer:
    """A stage that trains the UNet on freshly drawn pictures; seeds depend on the stage's name."""
    unet.to(run.device).train()
    encoder, basis = trained_text_encoder(run), load_basis(run, run.recipe.codec)
    tokenizer, scheduler = build_tokenizer(), build_scheduler()

    def loss(index: int) -> Tensor:
        drawn = draw_step(stage, run, phase, index, style=style)
        with torch.no_grad():
            hidden = encode_captions(encoder, tokenizer, drawn.captions)
            clean = basis.encode(drawn.pictures.pixels)
        noise = run.draw_noise(clean.shape, drawn.generator)
        steps = draw_timesteps(len(clean), phase, drawn.generator)
        on_device = steps.to(run.device)
        noisy = scheduler.add_noise(clean, noise, on_device)
        target = scheduler.get_velocity(clean, noise, on_device)
        predicted: Tensor = unet(noisy, on_device, encoder_hidden_states=hidden).sample
        known = drawn.is_stated | (steps < phase.unstated_weight_until)
        return weighted_error(predicted, target, drawn.pictures.placed, known, phase)

    return Trainer(stage, unet, loss, phase.optimisation)


@dataclass(frozen=True)
class DrawnStep:
    """One step's data: pictures, and the captions that the denoiser gets.

    `is_stated`: [B], whether the caption states place and size of every object. `generator`: for
    what the step still draws.
    """

    pictures: Pictures
    captions: tuple[str, ...]
    is_stated: Tensor
    generator: torch.Generator


def draw_step(
    stage: str,
    run: TrainingRun,
    phase: DenoiserPhase,
    index: int,
    *,
    style: Style = "plain",
    jitter: Jitter | None = None,
) -> DrawnStep:
    """Draw the pictures and captions of one step; a share of the captions is left empty.

    `jitter` is the recipe's by default.
    """
    seed = step_seed(run.recipe.seed, stage, index)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    jitter = jitter or run.recipe.jitter
    pictures = draw_pictures(rng, phase.captions, phase.buckets, jitter, run.device, style)
    captions = ["" if rng.random() < phase.caption_drop else text for text in pictures.captions]
    is_stated = [
        caption != "" and stated.is_placed
        for caption, stated in zip(captions, pictures.stated, strict=True)
    ]
    return DrawnStep(pictures, tuple(captions), torch.tensor(is_stated), generator)


def weighted_error(
    predicted: Tensor, target: Tensor, placed: Placed, known: Tensor, phase: DenoiserPhase
) -> Tensor:
    """Mean squared error [.] of latents [B, C, h, w], weighed by `loss_weights`."""
    rows, columns = target.shape[-2:]
    weights = loss_weights(placed, known.to(target.device), phase, width=columns, height=rows)
    squared: Tensor = weights * (predicted - target) ** 2
    return squared.mean() / weights.mean()


def lora_trainer(run: TrainingRun, recipe: LoraRecipe) -> Trainer:
    """The stage that trains one style's LoRA; the UNet's own weights stay as they are."""
    unet = base_unet(run).requires_grad_(False)
    torch.manual_seed(step_seed(run.recipe.seed, recipe.style, -1))
    unet.add_adapter(
        LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.rank,
            init_lora_weights="gaussian",
            target_modules=list(recipe.targets),
        )
    )
    return unet_trainer(recipe.style, run, recipe.phase, unet, recipe.style)
