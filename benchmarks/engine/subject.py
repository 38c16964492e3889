"""One set of weights, as the diffusers pipeline and as the engine's stages, in one thread."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from benchmarks.settings import MODEL
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.models.loading import (
    LoadedModel,
    encode_images,
    load_model,
    start_states,
)
from ray_cluster.engine.stages.autoencoder import ImageDecoder, ImageEncoder, Pixels
from ray_cluster.engine.stages.prompt_encoder import PipelineEncoder
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.requests import ImageRequest

_CPU = torch.device("cpu")
_COLOURS = ("red", "green", "blue", "yellow")
_SHAPES = ("circle", "square", "triangle")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured.

    Attributes:
        pipeline: as ``StableDiffusionPipeline.from_pretrained`` returns it.
        model: the engine's stages around the very text encoder of ``pipeline``, so that neither
            side has warmer caches there, and copies of its UNet and its autoencoder: the engine
            takes the one's weights over and changes the other's memory format.
    """

    pipeline: Any
    model: LoadedModel

    def start(
        self, requests: Sequence[ImageRequest], pixels: Sequence[EditPixels] = ()
    ) -> list[RequestState]:
        """Encode requests, as the runner's encode stages do.

        Args:
            pixels: of edits, all of one size; left out for images from text.
        """
        images = encode_images(self.model, pixels) if pixels else ()
        return start_states(self.model, requests, now_s=0.0, images=images)


def load_subject(max_batch: int = 16) -> Subject:
    """Load the model for measurements on one thread."""
    prepare_threads(1)
    pool = PoolConfig(
        name="benchmark", model=MODEL, max_batch=max_batch, max_in_flight=max_batch, max_px=256
    )
    pipeline = StableDiffusionPipeline.from_pretrained(
        resolve_folder(MODEL), local_files_only=True, safety_checker=None
    )
    pipeline.set_progress_bar_config(disable=True)
    model = replace(
        load_model(pool),
        encoder=PipelineEncoder(pipeline, _CPU),
        executor=UNetExecutor(
            copy.deepcopy(pipeline.unet), vae_scale_factor=pipeline.vae_scale_factor, device=_CPU
        ),
        decoder=ImageDecoder(copy.deepcopy(pipeline.vae), _CPU),
        images=ImageEncoder(copy.deepcopy(pipeline.vae), _CPU),
    )
    return Subject(pipeline, model)


def make_requests(
    count: int, *, px: int, num_steps: int | Sequence[int], guidance_scale: float
) -> list[ImageRequest]:
    """Return requests for different images; request ``i`` is the same in every call."""
    steps = [num_steps] * count if isinstance(num_steps, int) else list(num_steps)
    return [
        ImageRequest(
            request_id=f"{index}",
            model="benchmark",
            prompt=f"a {_COLOURS[index % 4]} {_SHAPES[index % 3]} on a black background",
            width_px=px,
            height_px=px,
            num_steps=steps[index],
            guidance_scale=guidance_scale,
            sampler="ddim",
            seed=1000 + index,
        )
        for index in range(count)
    ]


def largest_difference(first: dict[str, Pixels], second: dict[str, Pixels]) -> int:
    """Return the largest difference of a pixel value over the images in both, in 1/255.

    Raises:
        ValueError: they have no image in common, or one of another shape.
    """
    common = first.keys() & second.keys()
    if not common or any(first[name].shape != second[name].shape for name in common):
        raise ValueError("there is nothing to compare: no common image of one shape")
    return max(
        int(np.abs(first[name].astype(int) - second[name].astype(int)).max()) for name in common
    )


def bare_inputs(subject: Subject, states: Sequence[RequestState]) -> dict[str, Tensor]:
    """Return the inputs of a plain UNet call for the next step of the rows, guidance included."""
    tables = [
        subject.model.tables.table(s.request.sampler, s.request.num_steps, s.request.size_px)
        for s in states
    ]
    scales = torch.stack([t.input_scale[s.step_index] for t, s in zip(tables, states, strict=True)])
    steps = torch.stack([t.timesteps[s.step_index] for t, s in zip(tables, states, strict=True)])
    latents = torch.stack([s.latents for s in states]) * scales.reshape(-1, 1, 1, 1)
    embeds = [s.conditioning.prompt_embeds for s in states]
    negatives = [s.conditioning.negative_embeds for s in states]
    if negatives[0] is None:
        return {"sample": latents, "timestep": steps, "encoder_hidden_states": torch.stack(embeds)}
    return {
        "sample": torch.cat([latents, latents]),
        "timestep": torch.cat([steps, steps]),
        "encoder_hidden_states": torch.stack([n for n in negatives if n is not None] + embeds),
    }
