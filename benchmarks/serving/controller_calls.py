"""Calls of a cascade: each prompt both ways beforehand, then a trace, live."""

from __future__ import annotations

import base64
import io
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image

from benchmarks.serving.calls import open_loop
from benchmarks.serving.controller_audit import Pixels
from benchmarks.serving.controller_service import CASCADE, Service
from benchmarks.serving.controller_trace import Answer, Fate, Stage, Trace
from ray_cluster.quality.classifier import load_classifier, read_pictures
from ray_cluster.quality.suite import SuitePrompt, suite_prompts
from recipes.figures.scoring import Drawn

_CLIENTS = 8
_CLASSIFIED = 64
# after its deadline, in which a caller of the trace hangs up: what is late is of no use to it
_PATIENCE_S = 0.1


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a prompt beforehand: its images do not depend on who asks.

    Attributes:
        confidence: of the light image.
        light_right, heavy_right: whether the image shows what the prompt says.
    """

    confidence: float
    light_right: bool
    heavy_right: bool

    def is_right(self, stage: Stage) -> bool:
        """Return whether the image of a model is all right."""
        return self.heavy_right if stage == "heavy" else self.light_right


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a call.

    Attributes:
        total_s: at the client.
        elapsed_s: in the service.
        image: a PNG file.
    """

    total_s: float
    fate: Fate
    elapsed_s: float = 0.0
    stage: Stage = "light"
    confidence: float | None = None
    image: bytes = b""


def mixed_prompts(count: int) -> list[SuitePrompt]:
    """Return prompts of the suite, easy and hard in turn."""
    halves = [suite_prompts(kind, (count + 1) // 2) for kind in ("easy", "hard")]
    return list(chain.from_iterable(zip(*halves, strict=True)))[:count]


def pixels_of(image: bytes) -> Pixels:
    """Return the pixels [H, W, 3] of an image file."""
    with Image.open(io.BytesIO(image)) as opened:
        return np.asarray(opened.convert("RGB"))


def post(client: httpx.Client, prompt: SuitePrompt, slo_s: float, **fields: Any) -> Reply:
    """Have an image made; nothing is raised, whatever becomes of it."""
    body = {
        "model": CASCADE,
        "prompt": prompt.caption,
        "seed": prompt.noise_seed(),
        "slo_s": slo_s,
        **fields,
    }
    began_s = time.perf_counter()
    try:
        reply = client.post("/v1/images/generations", json=body)
    except httpx.ReadTimeout:
        return Reply(time.perf_counter() - began_s, "late")
    except httpx.HTTPError:
        return Reply(time.perf_counter() - began_s, "failed")
    total_s = time.perf_counter() - began_s
    if reply.status_code != httpx.codes.OK:
        is_refused = reply.status_code == httpx.codes.TOO_MANY_REQUESTS
        return Reply(total_s, "refused" if is_refused else "failed")
    found = reply.json()
    [image] = found["data"]
    return Reply(
        total_s,
        "in time" if total_s <= slo_s else "late",
        found["deadline"]["elapsed_s"],
        image["cascade"]["stage"],
        image["cascade"]["confidence"],
        base64.b64decode(image["b64_json"]),
    )


def is_up(service: Service) -> bool:
    """Return whether both models and the discriminator answer."""
    [prompt] = mixed_prompts(1)
    with service.client() as client:
        ways: Sequence[dict[str, str]] = ({"quality": "low"}, {"quality": "high"}, {})
        made = [post(client, prompt, 120.0, **fields) for fields in ways]
    return all(one.image for one in made) and made[-1].confidence is not None


def learn(service: Service, prompts: Sequence[SuitePrompt]) -> list[Known]:
    """Make every prompt's images by both models.

    The service must defer whatever it can.

    Raises:
        ValueError: a call failed, or was not deferred.
    """

    def both(client: httpx.Client, prompt: SuitePrompt) -> tuple[Reply, Reply]:
        light = post(client, prompt, quality="low", slo_s=600.0)
        heavy = post(client, prompt, slo_s=600.0)
        if not (light.image and heavy.stage == "heavy" and heavy.confidence is not None):
            raise ValueError(f"{prompt.caption!r} was not made both ways: {light}, {heavy}")
        return light, heavy

    with service.client() as client, ThreadPoolExecutor(_CLIENTS) as pool:
        pairs = list(pool.map(lambda prompt: both(client, prompt), prompts))
    light_right, heavy_right = (
        right_images(prompts, [pair[place].image for pair in pairs]) for place in range(2)
    )
    return [
        Known(heavy.confidence or 0.0, *right)
        for (_, heavy), *right in zip(pairs, light_right, heavy_right, strict=True)
    ]


def idle_route_s(service: Service, prompts: Sequence[SuitePrompt], count: int) -> float:
    """Return the median seconds of a deferred image while nothing else is made."""
    with service.client() as client:
        made = [post(client, prompt, 600.0) for prompt in prompts[:count]]
    return float(np.median([one.total_s for one in made]))


def heavy_capacity(service: Service, prompts: Sequence[SuitePrompt], seconds: float) -> float:
    """Return the images per second that the heavy replicas make for many clients."""
    stop, made = threading.Event(), [0] * _CLIENTS

    def work(number: int) -> None:
        with service.client() as client:
            while not stop.is_set():
                prompt = prompts[(number + _CLIENTS * made[number]) % len(prompts)]
                made[number] += bool(post(client, prompt, 600.0, quality="high").image)

    began_s = time.perf_counter()
    with ThreadPoolExecutor(_CLIENTS) as pool:
        calls = [pool.submit(work, number) for number in range(_CLIENTS)]
        time.sleep(seconds)
        total, took_s = sum(made), time.perf_counter() - began_s
        stop.set()
        for call in calls:
            call.result()
    return max(1, total) / took_s


def send(service: Service, trace: Trace, prompts: Sequence[SuitePrompt]) -> list[Reply]:
    """Send the trace's calls, each at its instant."""
    with service.client() as client:
        client.timeout = httpx.Timeout(trace.slo_s + _PATIENCE_S)

        def one(number: int) -> Reply:
            prompt = prompts[trace.prompts[number]]
            return post(client, prompt, trace.slo_s, when_late="refuse")

        replies = open_loop(trace.instants_s, one)
    return [Reply(0.0, "failed") if one is None else one for one in replies]


def answers_of(
    trace: Trace, prompts: Sequence[SuitePrompt], replies: Sequence[Reply]
) -> list[Answer]:
    """Return what became of the trace's calls, their images read by the attribute classifier."""
    made = [place for place, one in enumerate(replies) if one.image]
    asked = [prompts[trace.prompts[place]] for place in made]
    right = dict(zip(made, right_images(asked, [replies[one].image for one in made]), strict=True))
    return [
        Answer(at_s, reply.fate, reply.stage if place in right else None, right.get(place))
        for place, (at_s, reply) in enumerate(zip(trace.instants_s, replies, strict=True))
    ]


def right_images(prompts: Sequence[SuitePrompt], images: Sequence[bytes]) -> list[bool]:
    """Return which images show what their prompts say."""
    classifier, found = load_classifier(), list[bool]()
    for start in range(0, len(images), _CLASSIFIED):
        part = images[start : start + _CLASSIFIED]
        pixels = torch.stack(
            [torch.from_numpy(pixels_of(one).copy()).permute(2, 0, 1) / 255 for one in part]
        )
        readings = read_pictures(classifier, pixels)
        asked = prompts[start : start + _CLASSIFIED]
        found += [
            Drawn(prompt.scene, picture, reading).all_right
            for prompt, picture, reading in zip(asked, pixels, readings, strict=True)
        ]
    return found
