"""One set of weights, as the diffusers pipeline and as the engine's stages, in one thread."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor

from benchmarks.harness import MODEL
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.controlnets.asks import ControlNetBackend
from ray_cluster.engine.edits.template import SentLatents
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.engine.models.loading import (
    LoadedModel,
    encode_images,
    load_model,
    start_states,
)
from ray_cluster.engine.stages.autoencoder import ImageDecoder, ImageEncoder, Pixels
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.stages.prompt_encoder import PipelineEncoder
from ray_cluster.engine.stages.warmup import prepare_threads
from ray_cluster.engine.step.state import RequestState
from ray_cluster.engine.unet.executor import UNetExecutor
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.requests import ImageRequest

Images = dict[str, Pixels]
BASELINE = "one by one"
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
        latents = list(map(SentLatents, images))
        return start_states(self.model, requests, now_s=0.0, latents=latents)


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


def by_pipeline(pipeline: Any, requests: Sequence[ImageRequest], in_flight: int) -> Images:
    """Make the images by the pipeline in static batches of the requests in flight.

    One call has one number of steps, so only requests with as many steps as the oldest share it.
    """
    images: Images = {}
    queue, pending = deque(requests), list[ImageRequest]()
    while queue or pending:
        while queue and len(pending) < in_flight:
            pending.append(queue.popleft())
        batch = [one for one in pending if one.num_steps == pending[0].num_steps]
        pending = [one for one in pending if one not in batch]
        found = pipeline(
            prompt=[request.prompt for request in batch],
            negative_prompt=[request.negative_prompt or "" for request in batch],
            width=batch[0].width_px,
            height=batch[0].height_px,
            num_inference_steps=batch[0].num_steps,
            guidance_scale=batch[0].guidance_scale,
            generator=[torch.Generator("cpu").manual_seed(request.seed) for request in batch],
        ).images
        pairs = zip(batch, found, strict=True)
        images |= {request.request_id: np.asarray(image) for request, image in pairs}
    return images


@torch.inference_mode()
def by_engine(
    subject: Subject,
    requests: Sequence[ImageRequest],
    in_flight: int,
    *,
    pixels: Mapping[str, EditPixels] | None = None,
    sets_of: Callable[[str], AdapterSet | None] = lambda _request_id: None,
    controls: ControlNetBackend | None = None,
    maps_of: Callable[[ImageRequest], tuple[Tensor, ...]] = lambda _request: (),
) -> Images:
    """Make the images by the encode stages, the production step engine and the decode stage.

    Args:
        pixels: of edits, by request id; None for images from text.
        sets_of: returns a request's LoRAs, as it is admitted; of the denoiser alone.
        controls: ControlNets that requests may name.
        maps_of: returns what a request's ControlNets follow.
    """
    images: Images = {}
    queue = deque(requests)
    engine = build_engine(
        subject.model, max_batch=in_flight, clock=time.monotonic, controls=controls
    )
    while queue or len(engine):
        num_admitted = min(len(queue), in_flight - len(engine))
        if num_admitted:
            admitted = [queue.popleft() for _ in range(num_admitted)]
            own = [pixels[one.request_id] for one in admitted] if pixels is not None else []
            for state in subject.start(admitted, own):
                adapters = sets_of(state.request.request_id)
                state.maps = maps_of(state.request)
                engine.add(state, None if adapters is None else adapters.denoiser)
        report = engine.step()
        if report.failed:
            raise RuntimeError(f"a request failed: {report.failed[0].error}")
        for size in {state.request.size_px for state in report.finished}:
            alike = [state for state in report.finished if state.request.size_px == size]
            decoded = subject.model.decoder.decode([state.latents for state in alike])
            pairs = zip(alike, decoded, strict=True)
            images |= {state.request.request_id: image for state, image in pairs}
    return images
