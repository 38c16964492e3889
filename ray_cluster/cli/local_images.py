"""Images from the real engine in this process, validated as a gateway does."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import Progress

from ray_cluster.api.fidelity import fidelity_of
from ray_cluster.api.resolve import resolve
from ray_cluster.cli.call_check import CheckedCall
from ray_cluster.cli.made import GeneratedFile, GenerateFailed, MadeImages, effort_words
from ray_cluster.cli.plans import profile_of
from ray_cluster.cli.preview_files import PreviewFiles
from ray_cluster.cli.step_bar import step_progress
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.pools import PoolConfig
from ray_cluster.engine.building import build_runner
from ray_cluster.engine.events import Broken, Decoded, Previewed, RunnerEvent, Stepped
from ray_cluster.engine.loading import load_model
from ray_cluster.engine.runner import EngineRunner
from ray_cluster.engine.warmup import prepare_threads
from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.encoder import encode_image
from ray_cluster.requests import ImageRequest

_WAKE_S = 1.0
_MAX_SILENCE_S = 600.0


def generate_here(
    call: CheckedCall, config: ClusterConfig, previews: PreviewFiles, console: Console
) -> MadeImages:
    """Load the model in this process and make the images of one call.

    Raises:
        InvalidRequest: a parameter does not suit the model.
        ConfigError, ModelUnsupported, MemoryRefused: the model cannot be loaded.
        GenerateFailed: the model failed on the request.
    """
    logging.getLogger("ray_cluster").setLevel(logging.ERROR)
    pool = call.pool if call.pool in config.pools else _on_best_device(call.pool)
    prepare_threads(pool.num_threads)
    # what is wrong is said before the weights are loaded
    requests = resolve(call.fields, profile_of(pool), config.limits)
    with step_progress(console) as progress:
        return _make(pool, requests, config.dispatch.default_slo_s, previews, progress)


def _make(
    pool: PoolConfig,
    requests: Sequence[ImageRequest],
    default_slo_s: float,
    previews: PreviewFiles,
    progress: Progress,
) -> MadeImages:
    task = progress.add_task(f"loading {pool.model}", total=None)
    model = load_model(pool)
    total = sum(request.num_steps for request in requests)
    progress.update(task, description="denoising", total=total)
    events: queue.SimpleQueue[RunnerEvent] = queue.SimpleQueue()
    runner = build_runner(model, pool, events.put, clock=time.monotonic)
    first, started_s = requests[0], time.monotonic()
    runner.start()
    try:
        for request in requests:
            runner.submit(request, deadline_s=started_s + (first.slo_s or default_slo_s))
        decoded = _collect(
            runner,
            events,
            requests,
            on_steps=lambda count: progress.advance(task, count),
            on_preview=lambda event: _show(
                event, requests.index(event.request), previews, progress
            ),
        )
    finally:
        runner.stop()
    images = tuple(_code(decoded[request.request_id]) for request in requests)
    elapsed_s = time.monotonic() - started_s
    return MadeImages(
        model=first.model,
        size=f"{first.width_px}x{first.height_px}",
        images=images,
        elapsed_s=elapsed_s,
        deadline_met=None if first.slo_s is None else elapsed_s <= first.slo_s,
    )


def _on_best_device(pool: PoolConfig) -> PoolConfig:
    """Put a pool that no configuration names on the GPU where there is one."""
    if not torch.cuda.is_available():
        return pool
    return pool.model_copy(update={"device": "cuda", "dtype": "float16", "num_gpus": 1.0})


def _collect(
    runner: EngineRunner,
    events: queue.SimpleQueue[RunnerEvent],
    requests: Sequence[ImageRequest],
    *,
    on_steps: Callable[[int], None],
    on_preview: Callable[[Previewed], None],
) -> dict[str, Decoded]:
    """Return the decoded images by request id, once all are there."""
    decoded: dict[str, Decoded] = {}
    while len(decoded) < len(requests):
        try:
            event = events.get(timeout=_WAKE_S)
        except queue.Empty:
            runner.check_alive(_MAX_SILENCE_S)
            continue
        match event:
            case Stepped(report):
                on_steps(len(report.stepped))
            case Previewed():
                on_preview(event)
            case Decoded():
                decoded[event.request.request_id] = event
            case Broken(error=InvalidRequest() as error):
                raise error
            case Broken(error=RequestFailed() as error):
                raise GenerateFailed(f"The model failed on this request: {error}")
    return decoded


def _show(event: Previewed, image: int, previews: PreviewFiles, progress: Progress) -> None:
    spec = replace(event.request.output, metadata=False)
    path = previews.show(image, event.steps_done, encode_image(event.pixels, spec, {}))
    progress.console.print(f"step {event.steps_done}: preview in {path}", markup=False)


def _code(event: Decoded) -> GeneratedFile:
    request = event.request
    data = encode_image(event.pixels, request.output, request.recipe())
    effort = effort_words(fidelity_of(request))
    return GeneratedFile(data, request.seed, event.timing.as_dict(), effort)
