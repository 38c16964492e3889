"""Images with LoRAs by the engine, several at once, over diffusers with one request at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.engine.streams import BASELINE, Images, Way, by_engine, by_pipeline, compare
from benchmarks.engine.subject import Subject, load_subject, make_requests
from benchmarks.loras.settings import LoraSettings
from benchmarks.loras.subject import chosen, loaded, read_styles
from benchmarks.report import Section
from benchmarks.settings import Report
from ray_cluster.engine.adapters.adapter_set import AdapterSet, bind_adapters
from ray_cluster.engine.adapters.factors import open_factors, write_factors
from ray_cluster.requests import ImageRequest

# requests of the baseline: one of each LoRA
_ALONE = 3
KEPT, LOADED = "engine, LoRAs in memory", "engine, LoRAs from its folder"

Choice = Mapping[str, float]
"""A request's LoRAs with their scales."""


def measure(settings: LoraSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject = load_subject()
    cells: list[dict[str, Any]] = []
    problems: list[str] = []
    todo = list(product(settings.per_request, settings.in_flight))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for style, factors in read_styles().items():
            write_factors(factors, folder / style)
        for index, (per_request, in_flight) in enumerate(todo):
            cell = {"loras": per_request, "in_flight": in_flight}
            report(index / len(todo), f"{per_request} LoRAs a request, {in_flight} in flight")
            ways = ways_of(subject, folder, settings, per_request, in_flight)
            rows, wrong = compare(ways, settings.rounds)
            cells += [cell | row for row in rows]
            problems += [f"{cell}: {one}" for one in wrong]
    return {
        "what": f"images of {settings.px} px and {settings.num_steps} steps with built-in LoRAs "
        "over diffusers, which loads each request's LoRAs, makes its image and unloads them; one "
        "thread",
        "tables": {"requests with LoRAs in flight": cells},
        "problems": problems,
    }


def ways_of(
    subject: Subject, folder: Path, settings: LoraSettings, per_request: int, in_flight: int
) -> dict[str, Way]:
    """Return the ways to make the same images; the baseline makes the first few.

    Args:
        folder: of files of factors, by style.
    """
    count = max(_ALONE, in_flight)
    requests = make_requests(count, px=settings.px, num_steps=settings.num_steps, guidance_scale=1)
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
        BASELINE: Way(lambda: by_diffusers(subject.pipeline, requests[:_ALONE], choices), _ALONE),
        KEPT: Way(lambda: by_engine(subject, requests, in_flight, sets_of=found), count),
    }
    if per_request:
        ways[LOADED] = Way(lambda: by_engine(subject, requests, in_flight, sets_of=opened), count)
    # so that no way is slower for being first
    for way in ways.values():
        way.call()
    return ways


def by_diffusers(
    pipeline: Any, requests: Sequence[ImageRequest], choices: Mapping[str, Choice]
) -> Images:
    """Make images one after the other, each with its own LoRAs loaded."""
    images: Images = {}
    for one in requests:
        with loaded(pipeline, choices[one.request_id]):
            images |= by_pipeline(pipeline, [one], 1)
    return images
