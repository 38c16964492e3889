"""Images from the real engine in this process, validated as a gateway does."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ray_cluster.api.resolve import resolve
from ray_cluster.api.validate import validate
from ray_cluster.cli.made import GenerateFailed, MadeImage, MadeImages
from ray_cluster.cli.plans import profile_of
from ray_cluster.config import ClusterConfig, PoolConfig
from ray_cluster.engine.building import build_runner
from ray_cluster.engine.events import Broken, Decoded, RunnerEvent, Stepped
from ray_cluster.engine.loading import load_model
from ray_cluster.engine.runner import EngineRunner
from ray_cluster.engine.warmup import prepare_threads
from ray_cluster.errors import ConfigError, InvalidRequest, RequestFailed
from ray_cluster.image_coding import encode_image
from ray_cluster.reference_models.registry import BUILTIN_MODELS
from ray_cluster.requests import ImageRequest

_WAKE_S = 1.0
_MAX_SILENCE_S = 600.0


def generate_here(
    body: Mapping[str, Any], config: ClusterConfig, pool_name: str | None, console: Console
) -> MadeImages:
    """Load the model in this process and make the images of one call.

    Args:
        body: the parameters of the call, by the API's names.
        pool_name: the configured pool to take; None finds it by the body's model.

    Raises:
        InvalidRequest: a parameter is wrong.
        ConfigError, ModelUnsupported, MemoryRefused: the model cannot be loaded.
        GenerateFailed: the model failed on the request.
    """
    logging.getLogger("ray_cluster").setLevel(logging.ERROR)
    fields = validate(body)
    if fields.priority is not None:
        raise InvalidRequest(
            "The parameter 'priority' changes nothing without other requests; leave it out, or "
            "give --url.",
            "priority",
        )
    pool = choose_pool(config, fields.model, pool_name)
    prepare_threads(pool.num_threads)
    # what is wrong is said before the weights are loaded
    requests = resolve(fields, profile_of(pool), pool.defaults, config.limits)
    with _progress(console) as progress:
        return _make(pool, requests, config.dispatch.default_slo_s, progress)


def _make(
    pool: PoolConfig, requests: Sequence[ImageRequest], default_slo_s: float, progress: Progress
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
            runner, events, requests, on_steps=lambda count: progress.advance(task, count)
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


def choose_pool(config: ClusterConfig, model: str | None, pool_name: str | None) -> PoolConfig:
    """Return the pool to take: by name, by the model it serves, or made for a model of its own.

    Raises:
        InvalidRequest: no pool serves such a model, and it is no model itself.
        ConfigError: there is no pool of that name, or it serves another model.
    """
    if pool_name is not None:
        pool = config.pool(pool_name)
        if model not in {None, pool.model_name}:
            raise ConfigError(
                f"pool {pool_name} serves {pool.model_name}, not {model}; leave out --pool or "
                "--model"
            )
        return pool
    if model is None:
        return config.pools[0]
    for pool in config.pools:
        if pool.model_name == model:
            return pool
    if model in BUILTIN_MODELS or "/" in model:
        return _own_pool(model)
    served = sorted({pool.model_name for pool in config.pools})
    raise InvalidRequest(
        f"The parameter 'model' is {model!r}; the configuration serves {', '.join(served)}, and "
        f"built-in are {', '.join(BUILTIN_MODELS)}. Give one of these, a folder, or a hub id of "
        "the form owner/name.",
        "model",
    )


def _own_pool(model: str) -> PoolConfig:
    """Return a pool for a model that no configuration names: on the GPU where there is one."""
    if torch.cuda.is_available():
        device: Mapping[str, Any] = {"device": "cuda", "dtype": "float16", "num_gpus": 1}
    else:
        device = {"device": "cpu", "dtype": "float32"}
    return PoolConfig.model_validate(
        {"name": "local", "model": model, "served_as": model, **device}
    )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _collect(
    runner: EngineRunner,
    events: queue.SimpleQueue[RunnerEvent],
    requests: Sequence[ImageRequest],
    *,
    on_steps: Callable[[int], None],
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
            case Decoded():
                decoded[event.request.request_id] = event
            case Broken(error=InvalidRequest() as error):
                raise error
            case Broken(error=RequestFailed() as error):
                raise GenerateFailed(f"The model failed on this request: {error}")
    return decoded


def _code(event: Decoded) -> MadeImage:
    request = event.request
    data = encode_image(event.pixels, request.output, request.recipe())
    return MadeImage(data, request.seed, event.timing.as_dict())
