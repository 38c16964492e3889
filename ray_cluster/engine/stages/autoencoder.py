"""The autoencoder: latents to pixels and pixels to latents, in batches of one size."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ray_cluster.engine.device.device_errors import is_out_of_memory
from ray_cluster.engine.device.streams import finish_queued
from ray_cluster.engine.models.wide_layers import widen
from ray_cluster.models.local import vae_scale_factor

logger = logging.getLogger(__name__)

Pixels = npt.NDArray[np.uint8]
Mask = npt.NDArray[np.bool_]
ModuleT = TypeVar("ModuleT", bound=torch.nn.Module)
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

# latent pixels of a side: of smaller tiles the edges are all there is
_SMALLEST_TILE = 8

# as many as one image of 1024 x 1024 pixels with the usual autoencoder has
_LATENT_PIXELS_TOGETHER = 128 * 128
# more leave the caches: 8 images of 128 x 128 take 1.3 times, 16 take 1.7 times as long each
_LATENT_PIXELS_TOGETHER_ON_CPU = 64 * 64


class Decodes(Protocol):
    """Turns latents into pixels, here or elsewhere."""

    def decode(self, latents: Sequence[Tensor]) -> list[Pixels]:
        """Return ``[H, W, 3]`` uint8 pixels for each ``[C, h, w]``, all of one size."""


class EncodesImages(Protocol):
    """Turns pixels into latents, here or elsewhere."""

    @property
    def factor(self) -> int:
        """Image pixels along a side of a latent pixel."""

    def encode(self, images: Sequence[Pixels], greyed: Sequence[Mask | None] = ()) -> list[Tensor]:
        """Return float32 latents ``[C, h, w]`` for each ``[H, W, 3]`` uint8, all of one size."""


class _Autoencoder:
    """What decoding and encoding share: the module, its scale, and what to do without memory.

    Args:
        vae: ``AutoencoderKL`` or ``AutoencoderTiny`` in its dtype; its memory format may be
            changed.
        device: where it computes.
        turn: held while it works: encoding and decoding take turns, so that the memory of the
            larger one is enough for both. A lock of its own unless given.
    """

    def __init__(
        self, vae: Any, device: torch.device, turn: AbstractContextManager[Any] | None = None
    ) -> None:
        self._turn = turn or threading.Lock()
        # with tiles of its own
        self._vae: Any = copy.copy(in_decoders_format(vae.eval(), device))
        self._dtype = widen(vae, device)
        self._device = device
        config = vae.config
        self._factor = vae_scale_factor(config)
        self._scale = float(config.scaling_factor)
        # Stable Diffusion's and SDXL's have none
        self._shift = float(config.get("shift_factor") or 0.0)
        self._mean = config.get("latents_mean")
        self._std = config.get("latents_std")

    def _moments(self) -> tuple[Tensor, Tensor] | None:
        """Return mean and standard deviation of its latents, ``[1, C, 1, 1]``; None for most."""
        if self._mean is None or self._std is None:
            return None
        shape = (1, -1, 1, 1)
        mean, std = (
            torch.tensor(one, device=self._device).reshape(shape) for one in (self._mean, self._std)
        )
        return mean, std

    def _in_goes(
        self,
        items: Sequence[ItemT],
        latent_hw: tuple[int, int],
        work: Callable[[Sequence[ItemT]], list[ResultT]],
    ) -> list[ResultT]:
        """Work on items of one size in as many goes as bound the memory that it takes."""
        together = decode_batch(latent_hw[0] * latent_hw[1], len(items), self._device)
        results: list[ResultT] = []
        for start in range(0, len(items), together):
            results += self._within_memory(items[start : start + together], latent_hw, work)
        return results

    def _within_memory(
        self,
        items: Sequence[ItemT],
        latent_hw: tuple[int, int],
        work: Callable[[Sequence[ItemT]], list[ResultT]],
    ) -> list[ResultT]:
        for is_last in (False, True):
            try:
                with self._turn:
                    return work(items)
            except (RuntimeError, MemoryError) as error:
                is_hopeless = is_last and len(items) == 1 and not self._can_tile
                if is_hopeless or not is_out_of_memory(error):
                    raise
            # not above: the error holds the tensors of the failed call
            torch.cuda.empty_cache()
        if len(items) > 1:
            return [one for item in items for one in self._within_memory([item], latent_hw, work)]
        logger.warning("an image is coded in tiles: whole it ran out of memory twice")
        with self._turn, self._tiled(max(latent_hw)):
            return work(items)

    @property
    def _can_tile(self) -> bool:
        """Whether diffusers' tiles fit together: its ``AutoencoderTiny`` takes them for 8 px."""
        return bool(getattr(self._vae, "spatial_scale_factor", self._factor) == self._factor)

    @contextmanager
    def _tiled(self, side: int) -> Iterator[None]:
        """Have the autoencoder work in tiles of half a side of the latents."""
        vae = self._vae
        before = (vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size)
        tile = max(_SMALLEST_TILE, side // 2)
        vae.use_tiling, vae.tile_latent_min_size = True, tile
        vae.tile_sample_min_size = tile * self._factor
        try:
            yield
        finally:
            vae.use_tiling, vae.tile_latent_min_size, vae.tile_sample_min_size = before


class ImageDecoder(_Autoencoder):
    """Decodes with the model's autoencoder, as the diffusers pipelines do."""

    def decode(self, latents: Sequence[Tensor]) -> list[Pixels]:
        """Return ``[H, W, 3]`` uint8 pixels for each ``[C, h, w]``, all of one size.

        Many or large images are decoded in several goes, so that the memory it takes is bounded.
        Where it runs out all the same, they are tried once more with what the allocator keeps given
        back, then one by one, then in tiles whose edges are blended: better than to lose all steps.

        Raises:
            ArithmeticError: the autoencoder returned NaN or infinite pixels.
        """
        height, width = latents[0].shape[-2:]
        return self._in_goes(latents, (height, width), self._decode)

    def _decode(self, latents: Sequence[Tensor]) -> list[Pixels]:
        batch = torch.stack(list(latents)).to(self._device, torch.float32)
        if (moments := self._moments()) is not None:
            mean, std = moments
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


class ImageEncoder(_Autoencoder):
    """Encodes with the model's autoencoder, as the diffusers pipelines do, but for their noise.

    They draw latents from the distribution that the autoencoder gives; here it is its mode, so that
    the latents of an image are always the same.
    """

    @property
    def factor(self) -> int:
        """Image pixels along a side of a latent pixel."""
        return self._factor

    def encode(self, images: Sequence[Pixels], greyed: Sequence[Mask | None] = ()) -> list[Tensor]:
        """Return float32 latents ``[C, h, w]`` for each ``[H, W, 3]`` uint8, all of one size.

        Memory is bounded as in :meth:`ImageDecoder.decode`.

        Args:
            greyed: ``[H, W]`` for each image, what of it is grey, the middle of the range, instead.

        Raises:
            ArithmeticError: the autoencoder returned NaN or infinite latents.
        """
        height, width = images[0].shape[:2]
        latent_hw = (height // self._factor, width // self._factor)
        return self._in_goes(list(zip_longest(images, greyed)), latent_hw, self._encode)

    def _encode(self, images: Sequence[tuple[Pixels, Mask | None]]) -> list[Tensor]:
        pixels = torch.from_numpy(np.stack([one for one, _ in images])).to(self._device)
        batch = pixels.permute(0, 3, 1, 2).float() / 255 * 2 - 1
        for image, (_, grey) in zip(batch, images, strict=True):
            if grey is not None:
                image[:, torch.from_numpy(grey).to(self._device)] = 0.0
        encoded = self._vae.encode(batch.to(self._dtype))
        latents = encoded.latents if hasattr(encoded, "latents") else encoded.latent_dist.mode()
        latents = latents.float()
        if (moments := self._moments()) is not None:
            mean, std = moments
            latents = (latents - mean) * self._scale / std
        else:
            latents = (latents - self._shift) * self._scale
        is_finite = torch.isfinite(latents).all()
        # the host asks once all is queued, and sleeps until it is done
        finish_queued(self._device)
        if not bool(is_finite):
            raise ArithmeticError("the autoencoder returned NaN or infinite latents")
        return list(latents)


def decode_batch(num_latent_pixels: int, num_images: int, device: torch.device) -> int:
    """Return how many images of a latent size are coded together."""
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
