"""Engine, static batches and bare model calls against the pipeline one by one.

Batches of one size with 1 to 16 requests in flight, and a stream of requests with different numbers
of steps, which a static batch cannot mix.
"""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import torch

from benchmarks.engine.streams import BASELINE, Way, by_engine, by_pipeline, compare
from benchmarks.engine.subject import Subject, bare_inputs, load_subject, make_requests
from benchmarks.settings import SCALES, Report, Settings
from benchmarks.verdicts import Aim, at_least

# of the requests, for the baseline: one after the other takes longest
_ALONE = 2
_IN_FLIGHT = 8
_STEPS = (10, 20, 30)
# speed-up of 8 requests in flight at 64 px
_AIMS = {False: 2.2, True: 1.6}


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Return the section."""
    subject = load_subject()
    cells, streams, problems, aims = [], [], [], []
    todo = list(product(settings.sizes_px, SCALES, settings.in_flight))
    for index, (px, scale, in_flight) in enumerate(todo):
        cell = {"px": px, "guidance": scale > 1, "in_flight": in_flight}
        report(0.8 * index / len(todo), ", ".join(f"{key} {cell[key]}" for key in cell))
        rows, wrong = compare(_ways(subject, settings, px, scale, in_flight), settings.rounds)
        cells += [cell | row for row in rows]
        problems += [f"{cell}: {one}" for one in wrong]
    for index, scale in enumerate(SCALES):
        report(0.8 + 0.1 * index, f"stream of mixed steps, guidance {scale:g}")
        rows, wrong = compare(_stream(subject, settings, scale), settings.rounds)
        streams += [{"guidance": scale > 1, **row} for row in rows]
        problems += [f"stream, guidance {scale:g}: {one}" for one in wrong]
    aims = [_aim(row) for row in cells if _is_aimed_at(row)]
    return {
        "what": f"over the pipeline one by one, {settings.num_steps} steps, prompts to pixels, one "
        "thread; bare: the UNet calls alone, a ceiling",
        "tables": {
            "requests of one size": cells,
            f"a stream of {_STEPS} steps, 64 px, {_IN_FLIGHT} in flight": streams,
        },
        "aims": [aim.as_dict() for aim in aims],
        "problems": problems,
    }


def _ways(
    subject: Subject, settings: Settings, px: int, scale: float, in_flight: int
) -> dict[str, Way]:
    requests = make_requests(
        max(_ALONE, in_flight), px=px, num_steps=settings.num_steps, guidance_scale=scale
    )
    pipeline = subject.pipeline
    ways = {
        BASELINE: Way(lambda: by_pipeline(pipeline, requests[:_ALONE], 1), _ALONE),
        "engine": Way(lambda: by_engine(subject, requests, in_flight), len(requests)),
        "bare": Way(_bare_call(subject, requests[:in_flight]), in_flight / settings.num_steps),
    }
    if in_flight > 1:
        # a static batch of one is the baseline itself
        ways["static"] = Way(lambda: by_pipeline(pipeline, requests, in_flight), len(requests))
    # so that no way is slower for being first
    for way in ways.values():
        way.call()
    return ways


def _bare_call(subject: Subject, requests: list[Any]) -> Any:
    """A UNet call of the rows of one step."""
    with torch.inference_mode():
        inputs = bare_inputs(subject, subject.start(requests))

    @torch.inference_mode()
    def call() -> None:
        subject.pipeline.unet(**inputs, return_dict=False)

    return call


def _stream(subject: Subject, settings: Settings, scale: float) -> dict[str, Way]:
    count = settings.stream_requests
    shrink = _STEPS[0] // min(_STEPS[0], settings.num_steps)
    steps = [_STEPS[index % len(_STEPS)] // shrink for index in range(count)]
    random.Random(7).shuffle(steps)
    requests = make_requests(count, px=64, num_steps=steps, guidance_scale=scale)
    pipeline = subject.pipeline
    return {
        BASELINE: Way(lambda: by_pipeline(pipeline, requests, 1), count),
        "static": Way(lambda: by_pipeline(pipeline, requests, _IN_FLIGHT), count),
        "engine": Way(lambda: by_engine(subject, requests, _IN_FLIGHT), count),
    }


def _is_aimed_at(row: dict[str, Any]) -> bool:
    cell = (row["way"], row["px"], row["in_flight"])
    return cell == ("engine", 64, _IN_FLIGHT) and "speed_up_cpu" in row


def _aim(row: dict[str, Any]) -> Aim:
    figures = row["speed_up_cpu"]
    name = f"engine, 8 in flight, 64 px, guidance {'on' if row['guidance'] else 'off'}"
    return at_least(name, _AIMS[row["guidance"]], figures["median"], figures["ci95"], "x")
