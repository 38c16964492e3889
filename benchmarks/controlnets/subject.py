"""Requests with built-in ControlNets, their maps, and the diffusers pipelines for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from diffusers import ControlNetModel, StableDiffusionControlNetPipeline
from PIL import Image

from benchmarks.controlnets.services import MODELS
from benchmarks.engine.subject import Images, Subject, by_pipeline, make_requests
from benchmarks.loras.subject import loaded
from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.models.builtin import weights_folder
from ray_cluster.quality.distances import find_edges
from ray_cluster.requests import AddOns, BlobRef, ControlNetUse, ImageRequest

# the third is the first one with another map
NAMES = ("edges", "layout", "edges")
_NO_BLOB = BlobRef("", 0)


def controlled_requests(
    count: int, num_controls: int, *, px: int, num_steps: int
) -> list[ImageRequest]:
    """Return requests with so many ControlNets each."""
    uses = tuple(ControlNetUse(name, _NO_BLOB, 0.8) for name in NAMES[:num_controls])
    plain = make_requests(count, px=px, num_steps=num_steps, guidance_scale=2.0)
    return [replace(one, add_ons=AddOns(controls=uses)) for one in plain]


def maps_of(request: ImageRequest) -> list[Pixels]:
    """Return the maps of a request, ``[H, W, 3]`` each: a drawn disc, as edges or as it is."""
    found = []
    for place, use in enumerate(request.add_ons.controls):
        disc = _disc(request.seed + place, request.width_px)
        found.append(_edges(disc) if use.name == "edges" else disc)
    return found


def _disc(seed: int, px: int) -> Pixels:
    generator = np.random.default_rng(seed)
    rows, columns = np.mgrid[:px, :px]
    middle, radius = generator.uniform(px / 3, 2 * px / 3, 2), px / 6
    inside = (rows - middle[0]) ** 2 + (columns - middle[1]) ** 2 < radius**2
    picture = np.zeros((px, px, 3), np.uint8)
    picture[inside] = (255, 0, 0)
    return picture


def _edges(picture: Pixels) -> Pixels:
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 255
    edges = find_edges(pixels)[0].numpy().astype(np.uint8) * 255
    return np.repeat(edges[:, :, None], 3, axis=2)


@cache
def _net(name: str) -> ControlNetModel:
    return ControlNetModel.from_pretrained(weights_folder() / MODELS[name])


def by_diffusers(
    subject: Subject, requests: Sequence[ImageRequest], loras: Mapping[str, Mapping[str, float]]
) -> Images:
    """Make images one after the other, each with its own ControlNets, and its LoRAs loaded."""
    images: Images = {}
    for one in requests:
        with loaded(subject.pipeline, loras[one.request_id]):
            images |= _made(subject.pipeline, one)
    return images


def _made(base: Any, request: ImageRequest) -> Images:
    uses = request.add_ons.controls
    if not uses:
        return by_pipeline(base, [request], 1)
    pipeline = StableDiffusionControlNetPipeline(
        **base.components, controlnet=[_net(use.name) for use in uses]
    )
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        request.prompt,
        image=[Image.fromarray(one) for one in maps_of(request)],
        width=request.width_px,
        height=request.height_px,
        num_inference_steps=request.num_steps,
        guidance_scale=request.guidance_scale,
        controlnet_conditioning_scale=[use.scale for use in uses],
        generator=torch.Generator("cpu").manual_seed(request.seed),
    ).images[0]
    return {request.request_id: np.asarray(image)}
