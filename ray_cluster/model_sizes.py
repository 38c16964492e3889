"""The image sizes that a model makes in a pool, from configurations alone; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_cluster.config import PoolConfig


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Bounds and default of a model's sides.

    Attributes:
        multiple_px: every side is a multiple of it.
    """

    multiple_px: int
    min_px: int
    max_px: int
    default_width_px: int
    default_height_px: int


def model_sizes(pool: PoolConfig, unet: Mapping[str, Any], vae: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes as the model's parts and the pool say.

    Args:
        unet: the UNet's configuration in diffusers' form.
        vae: the autoencoder's, likewise.
    """
    factor = vae_scale_factor(vae)
    multiple = factor * 2 ** (len(unet["block_out_channels"]) - 1)
    sample = unet["sample_size"]
    rows, columns = (sample, sample) if isinstance(sample, int) else sample
    width, height = columns * factor, rows * factor
    if pool.defaults.size is not None:
        width, height = (int(part) for part in pool.defaults.size.split("x"))
    return ModelSizes(
        multiple_px=multiple,
        min_px=pool.min_px or multiple,
        max_px=pool.max_px or 2 * max(width, height),
        default_width_px=width,
        default_height_px=height,
    )


def vae_scale_factor(vae: Mapping[str, Any]) -> int:
    """Return image pixels per latent pixel of an autoencoder, from its configuration."""
    blocks = vae.get("block_out_channels") or vae["decoder_block_out_channels"]
    return int(2 ** (len(blocks) - 1))
