"""Edits of several masks, for the engine and for diffusers' inpainting pipeline."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from diffusers import StableDiffusionInpaintPipeline
from PIL import Image
from torch import Tensor

from benchmarks.engine.subject import Images, make_requests
from ray_cluster.engine.edits.template import own_noise
from ray_cluster.imaging.blending import Pixels
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.policies.edits import computed_steps
from ray_cluster.requests import BlobRef, Edit, ImageRequest

Mask = npt.NDArray[np.bool_]
# of the model's autoencoder: masks of whole latent pixels are the same to both sides
FACTOR = 4


def edit_requests(
    count: int, *, px: int, num_steps: int, guidance_scale: float, strength: float
) -> list[ImageRequest]:
    """Return edits of different images; request ``i`` is the same in every call.

    Args:
        num_steps: of the whole schedule.
    """
    whole = make_requests(count, px=px, num_steps=num_steps, guidance_scale=guidance_scale)
    return [
        replace(
            one,
            num_steps=computed_steps(num_steps, strength, is_flow=False),
            edit=Edit(
                BlobRef(f"{index:064x}", 1),
                one.size_px,
                num_steps,
                mask=BlobRef(f"{index:064x}", 1),
                strength=strength,
            ),
        )
        for index, one in enumerate(whole)
    ]


def picture(px: int, seed: int) -> Pixels:
    """Return an image of areas, a gradient and some noise, ``[px, px, 3]``."""
    numbers = np.random.default_rng(seed)
    share = np.linspace(0, 1, px)[:, None, None]
    colours = numbers.integers(0, 256, (3, 3))
    pixels = np.broadcast_to(colours[0] * share + colours[1] * (1 - share), (px, px, 3)).copy()
    pixels[px // 4 : px // 2, px // 3 :] = colours[2]
    return np.clip(pixels + numbers.integers(-6, 7, pixels.shape), 0, 255).astype(np.uint8)


def mask(px: int, index: int) -> Mask:
    """Return one of four masks, ``[px, px]``: a box, a disc, thin lines, nearly everything."""
    side = px // FACTOR
    rows, columns = np.mgrid[:side, :side]
    found: Mask
    match index % 4:
        case 0:
            found = (rows > side // 3) & (columns > side // 4) & (columns < 3 * side // 4)
        case 1:
            found = np.hypot(rows - side / 2, columns - side / 3) < side / 4
        case 2:
            found = (rows == side // 3) | (columns == side // 2)
        case _:
            found = (rows > 1) | (columns > side // 2)
    return found.repeat(FACTOR, 0).repeat(FACTOR, 1)


def pixels_of(requests: Sequence[ImageRequest]) -> dict[str, EditPixels]:
    """Return the decoded images of edits, by request id."""
    found = {}
    for index, one in enumerate(requests):
        image = picture(one.width_px, index)
        found[one.request_id] = EditPixels(image, mask(one.width_px, index), image, None)
    return found


@torch.inference_mode()
def by_inpainting(
    pipeline: StableDiffusionInpaintPipeline,
    requests: Sequence[ImageRequest],
    pixels: Mapping[str, EditPixels],
) -> Images:
    """Make edits by diffusers' inpainting pipeline, one after the other.

    Its noise is the engine's: outside the mask it belongs to the template.
    """
    images: Images = {}
    for one in requests:
        edit, own = one.edit, pixels[one.request_id]
        assert edit is not None
        assert own.mask is not None
        with _noise_of(pipeline, edit, own.mask):
            [found] = pipeline(
                prompt=one.prompt,
                negative_prompt=one.negative_prompt,
                image=Image.fromarray(own.work),
                mask_image=Image.fromarray(own.mask.astype(np.uint8) * 255),
                width=one.width_px,
                height=one.height_px,
                strength=edit.strength,
                num_inference_steps=edit.schedule_steps,
                guidance_scale=one.guidance_scale,
                generator=torch.Generator("cpu").manual_seed(one.seed),
            ).images
        images[one.request_id] = np.asarray(found)
    return images


@contextmanager
def _noise_of(pipeline: Any, edit: Edit, edited: Mask) -> Iterator[None]:
    module = sys.modules[type(pipeline).__module__]
    draw = module.randn_tensor
    inside = torch.from_numpy(edited[::FACTOR, ::FACTOR].copy())

    def composed(shape: Any, **options: Any) -> Tensor:
        drawn: Tensor = draw(shape, **options)
        return torch.where(inside, drawn, own_noise(edit, torch.Size(shape[1:])))

    with patch.object(module, "randn_tensor", composed):
        yield
