"""The codec: a tiny autoencoder whose latents are principal components of 4 x 4 patches.

The components are computed first and define the latents, so the denoiser can be trained before
the decoder is. The encoder learns to compute them, the decoder to add what linear decoding loses.
"""

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from diffusers import AutoencoderTiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from ray_cluster.quality.scenes import STYLES
from recipes.batches import draw_pictures
from recipes.recipe import CodecRecipe, Recipe
from recipes.runs import TrainingRun
from recipes.trainer import Trainer, step_seed


@dataclass(frozen=True)
class PatchBasis:
    """Principal components of patches: `mean` [3pp], `axes` [K, 3pp], `scale` [K]."""

    mean: Tensor
    axes: Tensor
    scale: Tensor
    patch: int

    def encode(self, pixels: Tensor) -> Tensor:
        """Pictures [B, 3, H, W] in 0..1 to latents [B, K, H/p, W/p] of about unit variance."""
        columns = F.pixel_unshuffle(pixels * 2 - 1, self.patch) - self.mean[:, None, None]
        codes = torch.einsum("bchw,kc->bkhw", columns, self.axes)
        return codes / self.scale[:, None, None]


def load_basis(run: TrainingRun, options: CodecRecipe) -> PatchBasis:
    """Load the run's patch components; compute and save them if there are none."""
    path = run.folder.path / options.basis_file
    if not path.is_file():
        basis = _fit_basis(run.recipe, options)
        run.folder.path.mkdir(parents=True, exist_ok=True)
        save_file({"mean": basis.mean, "axes": basis.axes, "scale": basis.scale}, path)
    tensors = {name: part.to(run.device) for name, part in load_file(path).items()}
    return PatchBasis(**tensors, patch=options.patch)


def _fit_basis(recipe: Recipe, options: CodecRecipe) -> PatchBasis:
    """Compute the components from freshly rendered pictures of 64 x 64 pixels."""
    rng = random.Random(step_seed(recipe.seed, "basis", 0))
    square = tuple(bucket for bucket in options.buckets if bucket.width == bucket.height == 64)
    rows: list[Tensor] = []
    while sum(len(part) for part in rows) < options.fit_pictures * 256:
        pixels = draw_pictures(rng, options.captions, square, recipe.jitter).pixels
        rows.append(
            F.pixel_unshuffle(pixels * 2 - 1, options.patch).permute(0, 2, 3, 1).flatten(0, 2)
        )
    patches = torch.cat(rows)
    mean = patches.mean(0)
    _, axes = torch.linalg.eigh(torch.cov((patches - mean).T))
    axes = axes.flip(1)[:, : options.latent_channels].T.contiguous()
    # a fixed sign, so that the basis doesn't depend on the eigenvalue routine
    axes = axes * torch.sign(axes.gather(1, axes.abs().argmax(1, keepdim=True)))
    # weak components stay weak, or their rare large values would leave the decoder's range
    scale = ((patches - mean) @ axes.T).std(0).clamp_min(options.least_scale)
    return PatchBasis(mean, axes, scale, options.patch)


def _build_codec(recipe: CodecRecipe) -> AutoencoderTiny:
    """Build the untrained autoencoder; scaling 1 and shift 0, as its latents have unit variance."""
    levels = (recipe.channels,) * 3
    return AutoencoderTiny(
        latent_channels=recipe.latent_channels,
        encoder_block_out_channels=levels,
        decoder_block_out_channels=levels,
        num_encoder_blocks=(1, 2, 2),
        num_decoder_blocks=(3, 2, 1),
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def codec_trainer(name: str, run: TrainingRun, options: CodecRecipe) -> Trainer:
    """A stage that trains encoder and decoder, each against the components' latents."""
    recipe = run.recipe
    torch.manual_seed(step_seed(recipe.seed, name, -1))
    codec, basis = _build_codec(options).to(run.device), load_basis(run, options)

    def loss(index: int) -> Tensor:
        seed = step_seed(recipe.seed, name, index)
        rng = random.Random(seed)
        is_styled = rng.random() < options.styled_share
        style = rng.choice(STYLES[1:]) if is_styled else "plain"
        pictures = draw_pictures(
            rng, options.captions, options.buckets, recipe.jitter, run.device, style
        )
        wanted, target = basis.encode(pictures.pixels), pictures.pixels * 2 - 1
        noise = run.draw_noise(wanted.shape, torch.Generator().manual_seed(seed))
        encoded = codec.encode(target).latents
        decoded = codec.decode(wanted + options.latent_noise * noise).sample
        rebuilt = 4 * F.mse_loss(decoded, target) + F.l1_loss(decoded, target)
        return rebuilt + F.mse_loss(encoded, wanted)

    return Trainer(name, codec, loss, options.optimisation)
