"""What the service adds to a request, its images per second, and its memory.

The overhead of a request is the client's total less the seconds of encode, denoise and decode that
the same reply reports.
"""

from __future__ import annotations

import binascii
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np

from benchmarks.engine.subject import load_subject
from benchmarks.serving.calls import image_body, post_image, running_service
from benchmarks.serving.processes import cpu_ms_per_request, cpu_s_by_role, memory_by_role
from benchmarks.serving.throughput import measure_throughput
from benchmarks.settings import Report, Settings
from benchmarks.stats import percentile, summarise
from benchmarks.verdicts import at_most
from ray_cluster.imaging.encoder import encode_image
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.requests import OutputSpec

_ENGINE_PARTS = ("encode_s", "denoise_s", "decode_s")
_WARM_UP = 3
_AIM_MS = 20.0


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Start the service with each number of replicas, and measure it."""
    subject = load_subject()
    requests, used, calls, flows, memory = [], [], [], [], []
    counts = settings.replica_counts
    for index, replicas in enumerate(counts):

        def part(done: float, text: str, index: int = index, replicas: int = replicas) -> None:
            report((index + done) / len(counts), f"{replicas} replica(s): {text}")

        about = {"replicas": replicas}
        part(0.0, "starting Ray and Serve")
        with running_service(replicas) as (url, start_s):
            part(0.3, "requests one after the other")
            for row, cpu_ms in _one_by_one(url, settings):
                requests.append(about | row)
                used.append(about | {"num_steps": row["num_steps"], **cpu_ms})
            part(0.7, "parts of a request")
            calls += [about | row for row in _calls(url, settings.short_requests)]
            part(0.8, "clients at once")
            flow = measure_throughput(subject, url, settings.throughput_rounds)
            flows.append(about | {"start_s": round(start_s, 1)} | flow)
            memory += [about | row for row in memory_by_role()]
    return {
        "what": "64 px, guidance on, wall time; overhead is the client's total less encode, "
        "denoise and decode of the same request",
        "tables": {
            "one client, ms": requests,
            "one client, CPU ms per request": used,
            "parts of a request alone, ms": calls,
            "clients at once, images per second": flows,
            "memory after load (PSS)": memory,
        },
        "aims": [_aim(row).as_dict() for row in requests],
    }


def _aim(row: dict[str, Any]) -> Any:
    figures = row["overhead"]
    name = f"service overhead p50, {row['replicas']} replica(s), {row['num_steps']} steps"
    return at_most(name, _AIM_MS, figures["median"], figures["ci95"], "ms")


def _one_by_one(url: str, settings: Settings) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Yield the figures of requests of 2 and of 20 steps, and CPU milliseconds by role."""
    with httpx.Client(base_url=url, timeout=120) as client:
        for num_steps, count in ((2, settings.short_requests), (20, settings.long_requests)):
            for seed in range(_WARM_UP):
                post_image(client, image_body(seed, num_steps=num_steps))
            before = cpu_s_by_role()
            replies = [
                post_image(client, image_body(seed, num_steps=num_steps)) for seed in range(count)
            ]
            parts = split([reply.total_s for reply in replies], [one.timing for one in replies])
            used = cpu_ms_per_request(before, cpu_s_by_role(), count)
            yield {"num_steps": num_steps, **parts}, used


def split(totals_s: list[float], timings: list[dict[str, float]]) -> dict[str, Any]:
    """Return the milliseconds of a request and of its parts.

    ``overhead`` is the sum of ``lease`` (in the dispatcher's queue until a replica's poll took it),
    ``code_and_report`` (from the decoded image to the dispatcher's knowledge of it, and the way of
    the lease to the replica) and ``http`` (everything outside the dispatcher).
    """
    total_s = np.array(totals_s)
    engine_s = np.array([sum(timing[part] for part in _ENGINE_PARTS) for timing in timings])
    queue_s, inside_s = (
        np.array([one[name] for one in timings]) for name in ("queue_s", "total_s")
    )
    parts_s = {
        "total": total_s,
        "engine": engine_s,
        "overhead": total_s - engine_s,
        "http": total_s - inside_s,
        "lease": queue_s,
        "code_and_report": inside_s - queue_s - engine_s,
    }
    return {name: _ms(values.tolist()) for name, values in parts_s.items()}


def _ms(samples_s: list[float]) -> dict[str, Any]:
    samples = [1e3 * one for one in samples_s]
    return summarise(samples).as_dict() | {"p95": percentile(samples, 95)}


def _calls(url: str, count: int) -> Iterator[dict[str, Any]]:
    """Measure the ways and works of a request one at a time, on the idle service."""
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    recipe, data = {"prompt": "a red circle"}, os.urandom(12_000)
    with httpx.Client(base_url=url, timeout=60) as client, ImageCoder() as coder:
        calls: dict[str, Callable[[], object]] = {
            "GET /healthz": lambda: client.get("/healthz").raise_for_status(),
            "GET /readyz (three calls of the dispatcher)": lambda: client.get("/readyz").content,
            "PNG in the coder process": lambda: coder.submit(pixels, OutputSpec(), recipe).result(),
            "PNG alone": lambda: encode_image(pixels, OutputSpec(), recipe),
            "base64 of a 64 px PNG": lambda: binascii.b2a_base64(data, newline=False),
        }
        samples_s = {name: [_seconds(call) for _ in range(count)] for name, call in calls.items()}
    for name, found in samples_s.items():
        yield {"part": name, "ms": _ms(found)}


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
