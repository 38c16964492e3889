"""The same requests by the diffusers pipeline and by the engine, in one thread.

Each way serves a closed loop: at most ``in_flight`` requests, and the next one as soon as one is
done, from prompts to uint8 pixels. The engine's stages run one after the other in the calling
thread; an ``EngineRunner`` would give each a thread of its own, and compare three threads with one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.subject import Subject, largest_difference
from benchmarks.stats import paired_ratio
from benchmarks.stopwatch import in_turns
from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.controlnets.asks import ControlNetBackend
from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.imaging.edit_images import EditPixels
from ray_cluster.requests import ImageRequest

Images = dict[str, Pixels]
# DESIGN: the image within 1/255 per pixel
TOLERANCE = 1
BASELINE = "one by one"


@dataclass(frozen=True, slots=True)
class Way:
    """A way to do a part of the work, with its share of it.

    Attributes:
        call: returns the images by request id; None if it makes none.
        num_images: that a call makes, or the share of one.
        is_exact: whether images that differ from the baseline's are an error.
    """

    call: Callable[[], Images | None]
    num_images: float
    is_exact: bool = True


def compare(ways: Mapping[str, Way], rounds: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Run all ways in turns.

    Args:
        ways: by name; ``one by one`` is the baseline.

    Returns:
        A row for each other way, and what is wrong. Wrong images get no speed-up.
    """
    images: dict[str, Images | None] = {}

    def run(name: str) -> Callable[[], None]:
        return lambda: images.update({name: ways[name].call()})

    costs = in_turns({name: run(name) for name in ways}, rounds)
    per_image = {name: [c.per(ways[name].num_images) for c in costs[name]] for name in ways}
    baseline, reference = per_image[BASELINE], images[BASELINE] or {}
    rows, problems = [], []
    for name, way in ways.items():
        made, own = images[name], per_image[name]
        if name == BASELINE:
            continue
        row: dict[str, Any] = {"way": name}
        difference = None if made is None else largest_difference(reference, made)
        if difference is not None and difference > TOLERANCE and way.is_exact:
            problems.append(f"{name}: images differ by {difference}/255, allowed {TOLERANCE}")
        else:
            for clock in ("cpu", "wall"):
                pair = [[getattr(one, f"{clock}_s") for one in side] for side in (baseline, own)]
                row[f"speed_up_{clock}"] = paired_ratio(*pair).as_dict()
        row["largest_difference_255"] = difference
        row["ms_per_image_cpu"] = 1e3 * min(one.cpu_s for one in own)
        rows.append(row)
    return rows, problems


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
