"""Edits by the engine, several at once, over diffusers' inpainting pipeline one by one."""

from __future__ import annotations

from functools import partial
from itertools import product

from diffusers import StableDiffusionInpaintPipeline

from benchmarks.edits.subject import by_inpainting, edit_requests, pixels_of
from benchmarks.engine.subject import BASELINE, by_engine, load_subject
from benchmarks.harness import NUM_STEPS, SCALES, Case, Plot, Study

_PX = 64
# of the requests, for the baseline: one after the other takes longest
_ALONE = 2


def measure(study: Study) -> None:
    """Measure edits of several strengths."""
    num_steps, title = study.pick(NUM_STEPS, 5), "edits in flight"
    study.found["what"] = (
        f"edits of {_PX} px with masks of four kinds over diffusers' inpainting pipeline one by "
        f"one, schedules of {num_steps} steps, from decoded images and prompts to pixels, one "
        "thread"
    )
    subject = load_subject()
    pipeline = StableDiffusionInpaintPipeline(
        **subject.pipeline.components, requires_safety_checker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    strengths, in_flights = study.pick((1.0, 0.6, 0.3), (1.0, 0.6)), study.pick((1, 4, 8), (1, 4))
    for scale, strength, in_flight in study.each(product(SCALES, strengths, in_flights)):
        count = max(_ALONE, in_flight)
        requests = edit_requests(
            count, px=_PX, num_steps=num_steps, guidance_scale=scale, strength=strength
        )
        pixels = pixels_of(requests)
        ways = {
            BASELINE: partial(by_inpainting, pipeline, requests[:_ALONE], pixels),
            "engine": partial(by_engine, subject, requests, in_flight, pixels=pixels),
        }
        about = {"guidance": scale > 1, "strength": strength, "in_flight": in_flight}
        shares = {BASELINE: _ALONE, "engine": count}
        study.compare(title, Case(about, ways, study.pick(9, 2), shares))
    study.plots.append(Plot(title, "in_flight", ("speed_up",), ("by", "strength", "guidance")))
