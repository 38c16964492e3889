"""Images from the real engine in this process, validated as a gateway does."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.progress import Progress

from ray_cluster.api.fidelity import fidelity_of
from ray_cluster.cli.call_check import CheckedCall
from ray_cluster.cli.image_files import (
    GeneratedFile,
    GeneratedImages,
    GenerateFailed,
    PreviewFiles,
    effort_words,
)
from ray_cluster.cli.lora_options import LocalLora
from ray_cluster.cli.plans import profile_of
from ray_cluster.cli.progress import step_progress
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.pools import PoolConfig
from ray_cluster.engine.adapters.adapter_set import bind_adapters
from ray_cluster.engine.adapters.lora_files import LoraFactors, read_lora
from ray_cluster.engine.building import build_runner
from ray_cluster.engine.events import Broken, Decoded, Previewed, RunnerEvent, Stepped
from ray_cluster.engine.folders import resolve_folder
from ray_cluster.engine.loading import load_model
from ray_cluster.engine.warmup import prepare_threads
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.blending import Pixels
from ray_cluster.imaging.encoder import encode_image
from ray_cluster.imaging.templates import EditPixels, finished
from ray_cluster.requests import ImageRequest

_CHECK_EVERY_S = 1.0
_MAX_SILENCE_S = 600.0


def generate_here(
    call: CheckedCall, config: ClusterConfig, previews: PreviewFiles, console: Console
) -> GeneratedImages:
    """Load the model in this process and make the images of one call.

    Raises:
        InvalidRequest: a parameter does not suit the model.
        ConfigError, ModelUnsupported, MemoryRefused: the model cannot be loaded.
        GenerateFailed: the model failed on the request.
    """
    logging.getLogger("ray_cluster").setLevel(logging.ERROR)
    pool = call.pool
    if pool not in config.pools and torch.cuda.is_available():
        # a pool that no configuration names
        on_gpu = {"device": "cuda", "dtype": "float16", "num_gpus": 1.0}
        pool = pool.model_copy(update=on_gpu)
    prepare_threads(pool.num_threads)
    # errors are raised before the weights are loaded
    requests = call.requests(profile_of(pool), config.limits)
    made_from = _MadeFrom(call.pixels(requests[0]), _factors(call.loras, pool))
    with step_progress(console) as progress:
        return _generate(
            pool, requests, made_from, config.dispatch.default_slo_s, previews, progress
        )


@dataclass(frozen=True, slots=True)
class _MadeFrom:
    """What the images of a call are made from beside its requests."""

    pixels: EditPixels | None
    loras: tuple[tuple[LoraFactors, float], ...]


def _factors(loras: Sequence[LocalLora], pool: PoolConfig) -> tuple[tuple[LoraFactors, float], ...]:
    """Read LoRAs; ModelUnsupported if one is not made for the model."""
    if not loras:
        return ()
    base = resolve_folder(pool.model)
    return tuple((read_lora(one.path, base), one.scale) for one in loras)


def _generate(
    pool: PoolConfig,
    requests: Sequence[ImageRequest],
    made_from: _MadeFrom,
    default_slo_s: float,
    previews: PreviewFiles,
    progress: Progress,
) -> GeneratedImages:
    task = progress.add_task(f"loading {pool.model}", total=None)
    model = load_model(pool)
    adapters = bind_adapters(model, made_from.loras) if made_from.loras else None
    pixels = made_from.pixels
    total = sum(request.num_steps for request in requests)
    progress.update(task, description="denoising", total=total)
    events: queue.SimpleQueue[RunnerEvent] = queue.SimpleQueue()
    runner = build_runner(model, pool, clock=time.monotonic)
    first, started_s = requests[0], time.monotonic()
    decoded: dict[str, Decoded] = {}
    runner.start(events.put)
    try:
        deadline_s = started_s + (first.slo_s or default_slo_s)
        for request in requests:
            runner.submit(request, deadline_s=deadline_s, pixels=pixels, adapters=adapters)
        while len(decoded) < len(requests):
            try:
                event = events.get(timeout=_CHECK_EVERY_S)
            except queue.Empty:
                runner.check_alive(_MAX_SILENCE_S)
                continue
            match event:
                case Stepped(report):
                    progress.advance(task, len(report.stepped))
                case Previewed():
                    shown = replace(event, pixels=_finished(event, pixels))
                    _write(shown, requests.index(event.request), previews, progress)
                case Decoded():
                    made = replace(event, pixels=_finished(event, pixels))
                    decoded[event.request.request_id] = made
                case Broken(error=InvalidRequest() as error):
                    raise error
                case Broken(error=RequestFailed() as error):
                    raise GenerateFailed(f"The model failed on this request: {error}")
    finally:
        runner.stop()
    images = tuple(_encode(decoded[request.request_id]) for request in requests)
    elapsed_s = time.monotonic() - started_s
    return GeneratedImages(
        model=first.model,
        size="{}x{}".format(*first.output_px),
        images=images,
        elapsed_s=elapsed_s,
        deadline_met=None if first.slo_s is None else elapsed_s <= first.slo_s,
    )


def _finished(event: Decoded | Previewed, edited: EditPixels | None) -> Pixels:
    """Return the pixels of the image that is returned."""
    edit = event.request.edit
    if edited is None or edit is None:
        return event.pixels
    return finished(event.pixels, edited, edit.window)


def _write(event: Previewed, image: int, previews: PreviewFiles, progress: Progress) -> None:
    spec = replace(event.request.output, metadata=False)
    path = previews.write(image, event.steps_done, encode_image(event.pixels, spec, {}))
    progress.console.print(f"step {event.steps_done}: preview in {path}", markup=False)


def _encode(event: Decoded) -> GeneratedFile:
    request = event.request
    data = encode_image(event.pixels, request.output, request.recipe())
    effort = effort_words(fidelity_of(request))
    return GeneratedFile(data, request.seed, event.timing.as_dict(), effort)
