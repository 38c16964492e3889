"""Edits by the engine, several at once, over diffusers' inpainting pipeline one by one."""

from __future__ import annotations

from itertools import product
from typing import Any

from diffusers import StableDiffusionInpaintPipeline

from benchmarks.edits.settings import EditSettings
from benchmarks.edits.subject import by_inpainting, edit_requests, pixels_of
from benchmarks.engine.streams import BASELINE, Way, by_engine, compare
from benchmarks.engine.subject import Subject, load_subject
from benchmarks.report import Section
from benchmarks.settings import SCALES, Report

# of the requests, for the baseline: one after the other takes longest
_ALONE = 2
ENGINE = "engine"


def measure(settings: EditSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject = load_subject()
    pipeline = StableDiffusionInpaintPipeline(
        **subject.pipeline.components, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    cells: list[dict[str, Any]] = []
    problems: list[str] = []
    todo = list(product(SCALES, settings.strengths, settings.in_flight))
    for index, (scale, strength, in_flight) in enumerate(todo):
        cell = {"guidance": scale > 1, "strength": strength, "in_flight": in_flight}
        report(index / len(todo), ", ".join(f"{key} {cell[key]}" for key in cell))
        ways = _ways(subject, pipeline, settings, scale, strength, in_flight)
        rows, wrong = compare(ways, settings.rounds)
        cells += [cell | row for row in rows]
        problems += [f"{cell}: {one}" for one in wrong]
    return {
        "what": f"edits of {settings.px} px with masks of four kinds over diffusers' inpainting "
        f"pipeline one by one, schedules of {settings.num_steps} steps, from decoded images and "
        "prompts to pixels, one thread",
        "tables": {"edits in flight": cells},
        "problems": problems,
    }


def _ways(
    subject: Subject,
    pipeline: StableDiffusionInpaintPipeline,
    settings: EditSettings,
    scale: float,
    strength: float,
    in_flight: int,
) -> dict[str, Way]:
    requests = edit_requests(
        max(_ALONE, in_flight),
        px=settings.px,
        num_steps=settings.num_steps,
        guidance_scale=scale,
        strength=strength,
    )
    pixels = pixels_of(requests)
    ways = {
        BASELINE: Way(lambda: by_inpainting(pipeline, requests[:_ALONE], pixels), _ALONE),
        ENGINE: Way(lambda: by_engine(subject, requests, in_flight, pixels=pixels), len(requests)),
    }
    # so that no way is slower for being first
    for way in ways.values():
        way.call()
    return ways
