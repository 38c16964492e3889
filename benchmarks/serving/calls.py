"""The service of the sections of ``benchmarks.run``, and calls for one image of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx

from benchmarks.serving.contenders import OwnContender
from benchmarks.serving.service_process import running
from benchmarks.settings import GUIDANCE

T = TypeVar("T")

_START_S = 300.0
# calls under way at once
_MOST_CALLS = 256


class Reply(NamedTuple):
    """The seconds that a call took at the client, and the ``timing`` in the reply."""

    total_s: float
    timing: dict[str, float]


@contextmanager
def running_service(replicas: int) -> Iterator[tuple[str, float]]:
    """Run the service in a process of its own; yields its URL and the seconds of its start."""
    started_s = time.monotonic()
    contender = OwnContender(what="the service", pool={"replicas": replicas})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running(contender, dtype="float32", alone_s={}, log=log) as url:
            while _num_replicas(url) < replicas:
                if time.monotonic() > started_s + _START_S:
                    raise TimeoutError(f"no {replicas} replicas after {_START_S:.0f} s")
                time.sleep(0.2)
            yield url, time.monotonic() - started_s


def _num_replicas(url: str) -> int:
    """Return how many replicas the dispatcher knows."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(line.startswith("ray_cluster_leased_images{") for line in lines)


def image_body(
    seed: int,
    *,
    num_steps: int,
    size: str = "64x64",
    guidance_scale: float = GUIDANCE,
    prompt: str = "a large red circle in the center on a black background",
) -> dict[str, Any]:
    """Return the body of a generation call of one image."""
    return {
        "prompt": prompt,
        "size": size,
        "seed": seed,
        "num_inference_steps": num_steps,
        "guidance_scale": guidance_scale,
    }


def post_image(client: httpx.Client, body: dict[str, Any]) -> Reply:
    """Have an image made.

    Raises:
        httpx.HTTPStatusError: the service refused or failed.
    """
    started_s = time.perf_counter()
    reply = client.post("/v1/images/generations", json=body)
    total_s = time.perf_counter() - started_s
    reply.raise_for_status()
    return Reply(total_s, reply.json()["data"][0]["timing"])


def open_loop(instants_s: Sequence[float], send: Callable[[int], T]) -> list[T | None]:
    """Send a call at each instant from now, by its number, whatever became of the others.

    Returns:
        What ``send`` returned; None for a call that failed, or was refused.
    """

    def one(number: int) -> T | None:
        try:
            return send(number)
        except httpx.HTTPError:
            return None

    with ThreadPoolExecutor(_MOST_CALLS) as pool:
        calls, started_s = [], time.perf_counter()
        for number, at_s in enumerate(instants_s):
            time.sleep(max(0.0, started_s + at_s - time.perf_counter()))
            calls.append(pool.submit(one, number))
        return [call.result() for call in calls]
