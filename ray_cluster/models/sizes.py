"""The image sizes that a model makes in a pool, from configurations alone; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ray_cluster.config.pools import PoolConfig
from ray_cluster.errors import ConfigError

# FLUX's pipeline has these numbers, not its transformer's configuration
_FLUX_PATCH = 2
_FLUX_SAMPLE_SIZE = 128


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


def model_sizes(pool: PoolConfig, model: Mapping[str, Any], vae: Mapping[str, Any]) -> ModelSizes:
    """Return the sizes as the model's parts and the pool say.

    Args:
        model: the UNet's or transformer's configuration in diffusers' form.
        vae: the autoencoder's, likewise.

    Raises:
        ConfigError: the pool's sizes do not suit the model, or it allows larger images than the
            model has positions for.
    """
    factor = vae_scale_factor(vae)
    multiple = factor * _smallest_side(model)
    sample = model.get("sample_size", _FLUX_SAMPLE_SIZE)
    rows, columns = (sample, sample) if isinstance(sample, int) else sample
    width, height = columns * factor, rows * factor
    if pool.defaults.size is not None:
        width, height = (int(part) for part in pool.defaults.size.split("x"))
    positions = model.get("pos_embed_max_size")
    limit = None if positions is None else positions * multiple
    if limit is not None and (pool.max_px or 0) > limit:
        raise ConfigError(
            f"pool {pool.name}: max_px is {pool.max_px}, but the model has positions for sides of "
            f"at most {limit} px; lower max_px"
        )
    largest = 2 * max(width, height)
    found = ModelSizes(
        multiple_px=multiple,
        min_px=pool.min_px or multiple,
        max_px=pool.max_px or (largest if limit is None else min(largest, limit)),
        default_width_px=width,
        default_height_px=height,
    )
    _check(pool, found)
    return found


def _check(pool: PoolConfig, sizes: ModelSizes) -> None:
    sides = {
        "default width": sizes.default_width_px,
        "default height": sizes.default_height_px,
        "min_px": sizes.min_px,
        "max_px": sizes.max_px,
    }
    for name, side in sides.items():
        if side % sizes.multiple_px or not sizes.min_px <= side <= sizes.max_px:
            raise ConfigError(
                f"pool {pool.name}: {name} is {side}; sides of this model are multiples of "
                f"{sizes.multiple_px} from {sizes.min_px} to {sizes.max_px}; "
                "change defaults.size, min_px or max_px"
            )


def patch_size(transformer: Mapping[str, Any]) -> int:
    """Return the latent pixels along a side of a transformer's tokens, from its configuration."""
    # FLUX's own says 1: its pipeline makes the patches
    return int(transformer["patch_size"]) if "sample_size" in transformer else _FLUX_PATCH


def _smallest_side(model: Mapping[str, Any]) -> int:
    """Return the latent pixels that a side must be a multiple of."""
    blocks = model.get("block_out_channels")
    return patch_size(model) if blocks is None else int(2 ** (len(blocks) - 1))


def vae_scale_factor(vae: Mapping[str, Any]) -> int:
    """Return image pixels per latent pixel of an autoencoder, from its configuration."""
    blocks = vae.get("block_out_channels") or vae["decoder_block_out_channels"]
    return int(2 ** (len(blocks) - 1))
