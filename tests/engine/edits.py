"""Edits through the engine, and through diffusers' own pipelines one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor

from ray_cluster.engine.edits.template import SentLatents, own_noise
from ray_cluster.engine.models.loading import LoadedModel, encode_images, start_states
from ray_cluster.engine.step.state import RequestState
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.policies.edits import computed_steps
from ray_cluster.requests import FLOW_SAMPLER_NAMES, BlobRef, Edit, ImageRequest
from tests.engine.harness import request
from tests.engine.reference import DIFFUSERS_BY_SAMPLER, Reference


def template(size_px: tuple[int, int], seed: int = 0) -> np.ndarray[Any, Any]:
    """An image with large shapes and some noise, ``[H, W, 3]`` uint8."""
    width, height = size_px
    numbers = np.random.default_rng(seed)
    pixels = np.full((height, width, 3), numbers.integers(0, 256, 3), np.uint8)
    pixels[height // 4 : height // 2, width // 3 :] = numbers.integers(0, 256, 3)
    return np.clip(pixels + numbers.integers(-20, 20, pixels.shape), 0, 255).astype(np.uint8)


def aligned_mask(size_px: tuple[int, int], factor: int) -> np.ndarray[Any, Any]:
    """A mask of whole latent pixels, ``[H, W]`` bool, neither convex nor symmetrical."""
    width, height = size_px[0] // factor, size_px[1] // factor
    mask = np.zeros((height, width), np.bool_)
    mask[height // 4 : height // 2, width // 4 :] = True
    mask[height // 2 :, width // 2 : width // 2 + 2] = True
    return mask.repeat(factor, 0).repeat(factor, 1)


def edit_pixels(pixels: Any, mask: Any | None) -> EditPixels:
    return EditPixels(pixels, mask, pixels, None)


def edit_request(
    request_id: str = "a", *, strength: float = 1.0, masked: bool = True, **changes: Any
) -> ImageRequest:
    """An edit; ``num_steps`` are those of the whole schedule."""
    whole = request(request_id, **changes)
    is_flow = whole.sampler in FLOW_SAMPLER_NAMES
    edit = Edit(
        BlobRef("5a" * 32, 1),
        whole.size_px,
        whole.num_steps,
        mask=BlobRef("6b" * 32, 1) if masked else None,
        strength=strength,
    )
    num_steps = computed_steps(whole.num_steps, strength, is_flow=is_flow)
    return replace(whole, num_steps=num_steps, edit=edit)


def start_edits(
    model: LoadedModel, requests: Sequence[ImageRequest], pixels: Sequence[EditPixels | None]
) -> list[RequestState]:
    """Return states before the first step, images encoded one by one."""
    with torch.inference_mode():
        images = [None if one is None else encode_images(model, [one])[0] for one in pixels]
        return start_states(model, requests, now_s=0.0, latents=list(map(SentLatents, images)))


class EditReference:
    """diffusers' image-to-image and inpainting pipelines over the parts of a reference."""

    def __init__(self, reference: Reference) -> None:
        self._pipeline = reference.pipeline
        self._config = reference.scheduler_config

    def latents(self, one: ImageRequest, pixels: EditPixels, **options: Any) -> Tensor:
        """Return the final latents ``[C, h, w]`` of an edit alone.

        The start is given to diffusers, as the issue of exactness is what comes of it: it takes the
        mode of the autoencoder's distribution, and outside the mask the template's own noise.
        """
        edit = one.edit
        assert edit is not None
        kind = AutoPipelineForImage2Image if pixels.mask is None else AutoPipelineForInpainting
        pipeline = self._pipeline
        if not any(one in type(pipeline).__name__ for one in ("Inpaint", "Fill")):
            pipeline = kind.from_pipe(pipeline)
        pipeline.set_progress_bar_config(disable=True)
        if one.sampler in DIFFUSERS_BY_SAMPLER:
            pipeline.scheduler = DIFFUSERS_BY_SAMPLER[one.sampler].from_config(self._config)
        else:
            pipeline.scheduler = type(pipeline.scheduler).from_config(self._config)
        given: dict[str, Any] = {"image": Image.fromarray(pixels.work), "strength": edit.strength}
        if pixels.mask is not None:
            given["mask_image"] = Image.fromarray(pixels.mask.astype(np.uint8) * 255)
        name = type(pipeline).__name__
        if name not in {"StableDiffusionImg2ImgPipeline", "StableDiffusionXLImg2ImgPipeline"}:
            given |= {"height": one.height_px, "width": one.width_px}
        if "Flux" not in name:
            given["negative_prompt"] = one.negative_prompt
        start = _fixed_start(pipeline, edit, pixels)
        with start, _usual_channels(pipeline), torch.inference_mode():
            found = pipeline(
                prompt=one.prompt,
                num_inference_steps=one.schedule_steps,
                guidance_scale=one.guidance_scale,
                generator=torch.Generator().manual_seed(one.seed),
                output_type="latent",
                **(given | options),
            ).images
        if found.ndim == 3:
            # FLUX leaves its tokens packed
            found = pipeline._unpack_latents(
                found, one.height_px, one.width_px, pipeline.vae_scale_factor
            )
        return found[0]


@contextmanager
def _usual_channels(pipeline: Any) -> Iterator[None]:
    """Have SD3's inpainting pipeline take a small model: it insists on 16 channels, for nothing."""
    if "StableDiffusion3Inpaint" not in type(pipeline).__name__:
        yield
        return
    transformer = pipeline.transformer
    own = transformer.config.in_channels
    transformer.register_to_config(in_channels=16)
    try:
        yield
    finally:
        transformer.register_to_config(in_channels=own)


@contextmanager
def _fixed_start(pipeline: Any, edit: Edit, pixels: EditPixels) -> Iterator[None]:
    module = sys.modules[type(pipeline).__module__]
    drawn_by_diffusers = module.randn_tensor

    def composed(shape: Any, **options: Any) -> Tensor:
        drawn: Tensor = drawn_by_diffusers(shape, **options)
        if pixels.mask is None:
            return drawn
        factor = pixels.work.shape[0] // shape[2]
        inside = torch.from_numpy(pixels.mask[::factor, ::factor])
        return torch.where(inside, drawn, own_noise(edit, torch.Size(shape[1:])))

    with (
        patch.object(module, "randn_tensor", composed),
        patch.object(
            DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode()
        ),
    ):
        yield
