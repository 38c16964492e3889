"""Requests at random instants, the same for every contender and, but for the pace, every load.

What became of each of them, and whether the service's own counts agree.
"""

from __future__ import annotations

import binascii
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from itertools import product
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from PIL import Image, UnidentifiedImageError

from benchmarks.baselines.settings import shape_name
from benchmarks.harness import MODEL
from benchmarks.serving.client import Answer
from benchmarks.serving.services import Contender, Counts, image_body
from ray_cluster.simulator.arrivals import constant_rate
from ray_cluster.simulator.workload import Arrival, Kind, Mix, draw_workload

# coefficient of variation of the gaps between arrivals
CV_BY_PROCESS = {"poisson": 1.0, "bursty": 2.0}
GUIDANCE = 2.0
# the deadline, in durations of the request alone on the baseline
SLO_TIMES = 5.0
FIRST_SEED = 7000
# requests are drawn for a trace this many times longer than needed, and its beginning is used
_SPARE = 3
_SEEDS_APART = 1_000_000
_DROPPED = "deadline_missed"

# only the first is no miss; a dropped one was accepted, and given up as it could not be in time
Fate = Literal["in time", "late", "degraded", "refused", "dropped", "failed", "lost"]
FATES: tuple[Fate, ...] = get_args(Fate)
FINISHED: tuple[Fate, ...] = ("in time", "late", "degraded")


class Shape(NamedTuple):
    """What decides how much work an image is; its guidance is always the same."""

    width_px: int
    height_px: int
    num_steps: int

    @property
    def name(self) -> str:
        """Its name in tables and files."""
        return shape_name(*self)

    @property
    def size(self) -> str:
        """Its size as the API spells it."""
        return f"{self.width_px}x{self.height_px}"


# all are as frequent
SHAPES = tuple(
    Shape(*size, steps)
    for size, steps in product(((64, 64), (96, 96), (128, 128), (64, 128), (128, 64)), (10, 20, 30))
)


class Planned(NamedTuple):
    """One request.

    Attributes:
        arrival_s: from the trace's beginning.
        seed: of its noise.
        slo_s: from arrival to the deadline.
    """

    arrival_s: float
    shape: Shape
    prompt: str
    seed: int
    slo_s: float

    def body(self, contender: Contender) -> dict[str, Any]:
        """Return the body of a contender's call."""
        fields = {"size": self.shape.size, "guidance_scale": GUIDANCE, "prompt": self.prompt}
        image = image_body(self.seed, self.shape.num_steps, sampler="ddim", **fields)
        call = {**contender.call, **image, "slo_s": round(self.slo_s, 6)}
        return {name: value for name, value in call.items() if name not in contender.omits}


class Trace(NamedTuple):
    """Requests in order of arrival, at the pace of load 1."""

    name: str
    requests: tuple[Planned, ...]

    def at(self, load: float) -> list[Planned]:
        """Return the same requests with that many times the pace; deadlines stay."""
        return [one._replace(arrival_s=one.arrival_s / load) for one in self.requests]

    def arrivals(self) -> list[Arrival]:
        """Return it as the simulator has it."""
        return [
            Arrival(
                arrival_s=one.arrival_s,
                model=MODEL,
                width_px=one.shape.width_px,
                height_px=one.shape.height_px,
                num_steps=one.shape.num_steps,
                uses_guidance=GUIDANCE > 1,
                slo_s=one.slo_s,
                slo_class=one.shape.size,
            )
            for one in self.requests
        ]


def draw_trace(
    process: str,
    number: int,
    count: int,
    prompts: Sequence[str],
    *,
    rate_per_s: float,
    alone_s: Mapping[str, float],
) -> Trace:
    """Draw a trace of so many requests.

    Args:
        prompts: drawn for the requests.
        rate_per_s: of load 1.
        alone_s: seconds of an image alone, by the name of its shape.
    """
    shapes = {shape.name: shape for shape in SHAPES}
    kinds = tuple(
        Kind(1.0, MODEL, one.width_px, one.height_px, one.num_steps, slo_class=name)
        for name, one in shapes.items()
    )
    mix = Mix(kinds, lambda kind: SLO_TIMES * alone_s[kind.slo_class])
    curve = constant_rate(rate_per_s, _SPARE * count / rate_per_s)
    # another stream for each process: equal numbers must not mean equal mixes
    seed = FIRST_SEED + 1000 * list(CV_BY_PROCESS).index(process) + number
    drawn = draw_workload(mix, curve, seed=seed, cv=CV_BY_PROCESS[process])
    assert len(drawn) >= count, "take another first seed"
    words = np.random.default_rng([seed, len(kinds)]).integers(len(prompts), size=len(drawn))
    planned = (
        Planned(
            one.arrival_s,
            shapes[one.slo_class],
            prompts[words[index]],
            seed * _SEEDS_APART + index,
            one.slo_s,
        )
        for index, one in enumerate(drawn[:count])
    )
    return Trace(f"{process}-{number}", tuple(planned))


class CallOutcome(NamedTuple):
    """What became of one request.

    Attributes:
        latency_s: from the planned instant to its answer; None without one.
        png: the image, empty without one.
        problem: what is wrong with a failed or lost one.
    """

    fate: Fate
    latency_s: float | None
    png: bytes = b""
    problem: str = ""


def outcome_of(planned: Planned, answer: Answer) -> CallOutcome:
    """Return what became of a request."""
    latency_s = answer.latency_s
    if answer.status is None or latency_s is None:
        return CallOutcome("lost", None, problem=answer.problem)
    if answer.status == HTTPStatus.TOO_MANY_REQUESTS:
        return CallOutcome("refused", latency_s)
    if answer.status != HTTPStatus.OK:
        words = answer.body[:200].decode(errors="replace")
        fate: Fate = "dropped" if _DROPPED in words else "failed"
        return CallOutcome(fate, latency_s, problem=f"status {answer.status}: {words}")
    try:
        image = json.loads(answer.body)["data"][0]
        png = binascii.a2b_base64(image["b64_json"])
        size = Image.open(io.BytesIO(png)).size
        num_steps = int(image["num_inference_steps"])
    except (ValueError, LookupError, TypeError, UnidentifiedImageError) as error:
        return CallOutcome("failed", latency_s, problem=f"no image: {error}")
    if size != planned.shape[:2]:
        return CallOutcome("failed", latency_s, problem=f"{size} for {planned.shape.size}")
    if num_steps < planned.shape.num_steps:
        return CallOutcome("degraded", latency_s, png)
    return CallOutcome("in time" if latency_s <= planned.slo_s else "late", latency_s, png)


def loses_nothing(outcomes: Sequence[CallOutcome], counts: Counts) -> bool:
    """Whether no accepted request was lost, by what the client saw and the service counts."""
    seen = Counter(one.fate for one in outcomes)
    finished = sum(seen[fate] for fate in FINISHED)
    accepted = len(outcomes) - seen["refused"]
    return not seen["lost"] and counts == (accepted, finished, seen["dropped"], seen["failed"])
