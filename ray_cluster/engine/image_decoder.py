"""The decode stage: latents to pixels, in batches of one size."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_cluster.engine.device_errors import is_out_of_memory
from ray_cluster.engine.streams import finish_queued
from ray_cluster.models.local import vae_scale_factor

logger = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)

# latent pixels of a side: of smaller tiles the edges are all there is
_SMALLEST_TILE = 8

# as many as one image of 1024 x 1024 pixels with the usual autoencoder has
_LATENT_PIXELS_TOGETHER = 128 * 128
# more leave the caches: 8 images of 128 x 128 take 1.3 times, 16 take 1.7 times as long each
_LATENT_PIXELS_TOGETHER_ON_CPU = 64 * 64


class ImageDecoder:
    """Decodes with the model's autoencoder, as the diffusers pipelines do.

    Args:
        vae: ``AutoencoderKL`` or ``AutoencoderTiny`` in its dtype; its memory format may be
            changed.
        device: where it computes.
    """

    def __init__(self, vae: Any, device: torch.device) -> None:
        self._vae: Any = in_decoders_format(vae.eval(), device)
        # diffusers walks through all modules to answer this
        self._dtype = vae.dtype
        self._device = device
        config = vae.config
        self._scale = float(config.scaling_factor)
        # Stable Diffusion's and SDXL's have none
        self._shift = float(config.get("shift_factor") or 0.0)
        self._mean = config.get("latents_mean")
        self._std = config.get("latents_std")

    def decode(self, latents: Sequence[Tensor]) -> list[Pixels]:
        """Return ``[H, W, 3]`` uint8 pixels for each ``[C, h, w]``, all of one size.

        Many or large images are decoded in several goes, so that the memory it takes is bounded.
        Where it runs out all the same, they are tried once more with what the allocator keeps given
        back, then one by one, then in tiles whose edges are blended: better than to lose all steps.

        Raises:
            ArithmeticError: the autoencoder returned NaN or infinite pixels.
        """
        num_pixels = latents[0].shape[-2] * latents[0].shape[-1]
        together = decode_batch(num_pixels, len(latents), self._device)
        images: list[Pixels] = []
        for start in range(0, len(latents), together):
            images += self._decode_within_memory(latents[start : start + together])
        return images

    def _decode_within_memory(self, latents: Sequence[Tensor]) -> list[Pixels]:
        for is_last in (False, True):
            try:
                return self._decode(latents)
            except (RuntimeError, MemoryError) as error:
                is_hopeless = is_last and len(latents) == 1 and not self._can_tile
                if is_hopeless or not is_out_of_memory(error):
                    raise
            # not above: the error holds the tensors of the failed call
            torch.cuda.empty_cache()
        if len(latents) > 1:
            return [image for one in latents for image in self._decode_within_memory([one])]
        logger.warning("an image is decoded in tiles: whole it ran out of memory twice")
        with self._tiled(max(latents[0].shape[-2:])):
            return self._decode(latents)

    @property
    def _can_tile(self) -> bool:
        """Whether diffusers' tiles fit together: its ``AutoencoderTiny`` takes them for 8 px."""
        factor = vae_scale_factor(self._vae.config)
        return bool(getattr(self._vae, "spatial_scale_factor", factor) == factor)

    @contextmanager
    def _tiled(self, side: int) -> Iterator[None]:
        """Have the autoencoder decode in tiles of half a side of the latents."""
        vae = self._vae
        before = (vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size)
        tile = max(_SMALLEST_TILE, side // 2)
        vae.use_tiling, vae.tile_latent_min_size = True, tile
        vae.tile_sample_min_size = tile * vae_scale_factor(vae.config)
        try:
            yield
        finally:
            vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size = before

    def _decode(self, latents: Sequence[Tensor]) -> list[Pixels]:
        batch = torch.stack(list(latents)).to(self._device, torch.float32)
        if self._mean is not None and self._std is not None:
            shape = (1, -1, 1, 1)
            mean = torch.tensor(self._mean, device=batch.device).reshape(shape)
            std = torch.tensor(self._std, device=batch.device).reshape(shape)
            batch = batch * std / self._scale + mean
        else:
            batch = batch / self._scale + self._shift
        images = self._vae.decode(batch.to(self._dtype), return_dict=False)[0].float()
        is_finite = torch.isfinite(images).all()
        images = ((images / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
        images = images.permute(0, 2, 3, 1).contiguous()
        # the host asks once all is queued, and sleeps until it is done
        finish_queued(self._device)
        if not bool(is_finite):
            raise ArithmeticError("the autoencoder returned NaN or infinite pixels")
        # a quarter of the bytes crosses to the host
        return list(images.cpu().numpy())


def decode_batch(num_latent_pixels: int, num_images: int, device: torch.device) -> int:
    """Return how many images of a latent size are decoded together."""
    on_cpu = device.type == "cpu"
    limit = _LATENT_PIXELS_TOGETHER_ON_CPU if on_cpu else _LATENT_PIXELS_TOGETHER
    return max(1, min(num_images, limit // num_latent_pixels))


def in_decoders_format(vae: ModuleT, device: torch.device) -> ModuleT:
    """Convert an autoencoder in place to the memory format that is fastest; return it.

    On a CPU that is channels last: the built-in models' takes 0.6 to 0.85 of its time, and Stable
    Diffusion's 0.92 of it at 512 px. On a GPU it is too where numbers have 16 bits: tensor cores
    take them in that order, and cuDNN would reorder every weight in every call.
    """
    for part in vae.modules():
        if isinstance(part, torch.nn.Conv2d):
            weight = part.weight.data
            if device.type == "cpu" or weight.dtype.itemsize == 2:
                # not Module.to: that refuses the fake tensors by which memory is planned
                part.weight.data = weight.contiguous(memory_format=torch.channels_last)
    return vae
