"""Images with LoRAs by the engine, several at once, over diffusers with one request at a time."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.engine.subject import (
    BASELINE,
    Images,
    Subject,
    by_engine,
    by_pipeline,
    load_subject,
    make_requests,
)
from benchmarks.harness import MODEL, NUM_STEPS, Case, Plot, Study
from benchmarks.loras.subject import STYLES, chosen, file_of, loaded, read_styles
from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.factors import open_factors, write_factors
from ray_cluster.engine.adapters.lora_files import read_lora
from ray_cluster.engine.files.folders import resolve_folder
from ray_cluster.requests import ImageRequest

_PX = 64
# requests of the baseline: one of each LoRA
_ALONE = 3
KEPT, LOADED = "engine, LoRAs in memory", "engine, LoRAs from its folder"


def measure(study: Study) -> None:
    """Measure requests with none, one and two LoRAs."""
    num_steps = study.pick(NUM_STEPS, 3)
    study.found["what"] = (
        f"images of {_PX} px and {num_steps} steps with built-in LoRAs over diffusers, which loads "
        "each request's LoRAs, makes its image and unloads them; one thread"
    )
    subject, title = load_subject(), "requests with LoRAs in flight"
    todo = product(study.pick((0, 1, 2), (0, 2)), study.pick((1, 4, 8), (1, 4)))
    with tempfile.TemporaryDirectory() as name:
        for style, factors in read_styles().items():
            write_factors(factors, Path(name) / style)
        for per_request, in_flight in study.each(todo):
            ways = ways_of(subject, Path(name), num_steps, per_request, in_flight)
            about = {"loras": per_request, "in_flight": in_flight}
            shares = dict.fromkeys(ways, max(_ALONE, in_flight)) | {BASELINE: _ALONE}
            study.compare(title, Case(about, ways, study.pick(7, 1), shares))
    study.plots.append(Plot(title, "in_flight", ("speed_up",), ("loras", "by")))


def ways_of(
    subject: Subject, folder: Path, num_steps: int, per_request: int, in_flight: int
) -> dict[str, Callable[[], Images]]:
    """Return the ways to make the same images; the baseline makes the first few.

    Args:
        folder: of files of factors, by style.
    """
    count = max(_ALONE, in_flight)
    requests = make_requests(count, px=_PX, num_steps=num_steps, guidance_scale=1)
    names = [one.request_id for one in requests]
    choices = dict(zip(names, chosen(per_request, count), strict=True))
    kept: dict[tuple[tuple[str, float], ...], AdapterSet | None] = {}

    def opened(request_id: str) -> AdapterSet | None:
        loras = [(open_factors(folder / one), scale) for one, scale in choices[request_id].items()]
        return bind_adapters(subject.model, loras) if loras else None

    def found(request_id: str) -> AdapterSet | None:
        key = tuple(choices[request_id].items())
        if key not in kept:
            kept[key] = opened(request_id)
        return kept[key]

    ways = {
        BASELINE: lambda: by_diffusers(subject.pipeline, requests[:_ALONE], choices),
        KEPT: lambda: by_engine(subject, requests, in_flight, sets_of=found),
    }
    if per_request:
        ways[LOADED] = lambda: by_engine(subject, requests, in_flight, sets_of=opened)
    return ways


def by_diffusers(
    pipeline: Any, requests: Sequence[ImageRequest], choices: Mapping[str, Mapping[str, float]]
) -> Images:
    """Make images one after the other, each with its own LoRAs loaded, by their scales."""
    images: Images = {}
    for one in requests:
        with loaded(pipeline, choices[one.request_id]):
            images |= by_pipeline(pipeline, [one], 1)
    return images


def measure_loading(study: Study) -> None:
    """Measure how long a LoRA takes from its file to a request."""
    study.found["what"] = (
        "one LoRA, wall clock. convert: read by diffusers' converters and checked (in a process of "
        "its own, once a node); write: the node's file of factors; open: that file mapped; bind: "
        "to the model, from opened factors (once a replica); diffusers: load, activate and unload, "
        "in each request"
    )
    subject = load_subject()
    with tempfile.TemporaryDirectory() as folder:
        for style in study.each(STYLES):
            parts = _parts(subject, style, Path(folder) / style)
            study.compare(
                "ms of one LoRA", Case({"lora": style}, parts, study.pick(15, 2), clock="wall")
            )


def _parts(subject: Subject, style: str, path: Path) -> dict[str, Callable[[], object]]:
    file, base, pipeline = file_of(style), resolve_folder(MODEL), subject.pipeline
    factors = read_lora(file, base)
    write_factors(factors, path)
    opened = open_factors(path)

    def by_diffusers() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipeline.load_lora_weights(file, adapter_name=style)
            pipeline.set_adapters([style], [1.0])
            pipeline.unload_lora_weights()

    return {
        "diffusers": by_diffusers,
        "convert": lambda: read_lora(file, base),
        "write": lambda: write_factors(factors, path),
        "open": lambda: open_factors(path),
        "bind": lambda: bind_adapters(subject.model, [(opened, 1.0)]),
    }
