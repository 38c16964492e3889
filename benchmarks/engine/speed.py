"""Engine, static batches and bare model calls against the pipeline one by one.

Batches of one size with 1 to 16 requests in flight, and a stream of requests with different numbers
of steps, which a static batch cannot mix.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import product

import torch

from benchmarks.engine.subject import (
    BASELINE,
    Subject,
    bare_inputs,
    by_engine,
    by_pipeline,
    load_subject,
    make_requests,
)
from benchmarks.harness import NUM_STEPS, SCALES, Case, Study
from ray_cluster.requests import ImageRequest

# of the requests, for the baseline: one after the other takes longest
_ALONE = 2
_IN_FLIGHT = 8
_STEPS = (10, 20, 30)
# speed-up of 8 requests in flight at 64 px
_AIMS = {False: 2.2, True: 1.6}


def measure(study: Study) -> None:
    """Measure batches of one size, then streams of several step counts."""
    subject, num_steps = load_subject(), study.pick(NUM_STEPS, 3)
    study.found["what"] = (
        f"over the pipeline one by one, {num_steps} steps, prompts to pixels, one thread; bare: "
        "the UNet calls alone, a ceiling"
    )
    sizes_px, in_flights = study.pick((64, 96, 128), (64,)), study.pick((1, 4, 8, 16), (1, 4))
    with study.part(0.0, 0.8):
        for px, scale, in_flight in study.each(product(sizes_px, SCALES, in_flights)):
            case = _batches(subject, px, scale, in_flight, num_steps, study.pick(5, 1))
            rows = study.compare("requests of one size", case)
            if (px, in_flight) == (64, _IN_FLIGHT) and "speed_up" in rows["engine"]:
                name = f"engine, 8 in flight, 64 px, guidance {'on' if scale > 1 else 'off'}"
                study.at_least(name, _AIMS[scale > 1], rows["engine"]["speed_up"], "x")
    with study.part(0.8, 1.0):
        for scale in study.each(SCALES):
            steps = [one // study.pick(1, 3) for one in _STEPS]
            case = _stream(subject, scale, steps, study.pick(18, 4), study.pick(5, 1))
            study.compare(f"a stream of {_STEPS} steps, 64 px, {_IN_FLIGHT} in flight", case)


def _batches(
    subject: Subject, px: int, scale: float, in_flight: int, num_steps: int, rounds: int
) -> Case:
    count = max(_ALONE, in_flight)
    requests = make_requests(count, px=px, num_steps=num_steps, guidance_scale=scale)
    ways: dict[str, Callable[[], object]] = {
        BASELINE: lambda: by_pipeline(subject.pipeline, requests[:_ALONE], 1),
        "engine": lambda: by_engine(subject, requests, in_flight),
        "bare": _bare_call(subject, requests[:in_flight]),
    }
    if in_flight > 1:
        # a static batch of one is the baseline itself
        ways["static"] = lambda: by_pipeline(subject.pipeline, requests, in_flight)
    shares = {BASELINE: _ALONE, "engine": count, "static": count, "bare": in_flight / num_steps}
    about = {"px": px, "guidance": scale > 1, "in_flight": in_flight}
    return Case(about, ways, rounds, shares)


def _bare_call(subject: Subject, requests: Sequence[ImageRequest]) -> Callable[[], None]:
    """A UNet call of the rows of one step."""
    with torch.inference_mode():
        inputs = bare_inputs(subject, subject.start(requests))

    @torch.inference_mode()
    def call() -> None:
        subject.pipeline.unet(**inputs, return_dict=False)

    return call


def _stream(subject: Subject, scale: float, steps: Sequence[int], count: int, rounds: int) -> Case:
    drawn = [steps[index % len(steps)] for index in range(count)]
    random.Random(7).shuffle(drawn)
    requests = make_requests(count, px=64, num_steps=drawn, guidance_scale=scale)
    ways = {
        BASELINE: lambda: by_pipeline(subject.pipeline, requests, 1),
        "static": lambda: by_pipeline(subject.pipeline, requests, _IN_FLIGHT),
        "engine": lambda: by_engine(subject, requests, _IN_FLIGHT),
    }
    return Case({"guidance": scale > 1}, ways, rounds, dict.fromkeys(ways, count))
