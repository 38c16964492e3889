"""What the service adds to a request, its images per second, and its memory.

The overhead of a request is the client's total less the seconds of encode, denoise and decode that
the same reply reports.
"""

from __future__ import annotations

import binascii
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from benchmarks.engine.subject import Subject, load_subject, make_requests
from benchmarks.figures import Figure, paired_ratio, percentile, summarise
from benchmarks.harness import GUIDANCE, NUM_STEPS, Row, Study, in_turns
from benchmarks.serving.processes import cpu_ms_per_request, cpu_s_by_role, memory_by_role
from benchmarks.serving.services import (
    Contender,
    Running,
    image_body,
    post_image,
    running,
    samples,
    until,
)
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.stages.events import Broken, Decoded, RunnerEvent
from ray_cluster.engine.stages.runner import EngineRunner
from ray_cluster.imaging.encoder import encode_image
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.requests import OutputSpec

_CLIENTS = 8
_COUNT = 3 * _CLIENTS
_START_S = 300.0
_ENGINE_PARTS = ("encode_s", "denoise_s", "decode_s")
_WARM_UP = 3
_AIM_MS = 20.0


def measure(study: Study) -> None:
    """Start the service with each number of replicas, and measure it."""
    study.found["what"] = (
        "64 px, guidance on, wall time; overhead is the client's total less encode, denoise and "
        "decode of the same request"
    )
    subject, count = load_subject(), study.pick(100, 6)
    for replicas in study.each(study.pick((1, 2), (1,))):
        started_s = time.monotonic()
        with running(Contender(pool={"replicas": replicas})) as service:
            until(partial(_has_replicas, service, replicas), most_s=_START_S)
            start_s = time.monotonic() - started_s
            for num_steps, calls in ((2, count), (20, study.pick(40, 2))):
                parts, used = _one_by_one(service, num_steps, calls)
                study.row("one client, ms", replicas=replicas, num_steps=num_steps, **parts)
                title = "one client, CPU ms per request"
                study.row(title, replicas=replicas, num_steps=num_steps, **used)
                name = f"service overhead p50, {replicas} replica(s), {num_steps} steps"
                study.at_most(name, _AIM_MS, parts["overhead"], "ms")
            for name, ms in _calls(service, count).items():
                study.row("parts of a request alone, ms", replicas=replicas, part=name, ms=ms)
            flow = _throughput(subject, service, study.pick(4, 1))
            title = "clients at once, images per second"
            study.row(title, replicas=replicas, start_s=round(start_s, 1), **flow)
            for row in memory_by_role():
                study.row("memory after load (PSS)", replicas=replicas, **row)


def _has_replicas(service: Running, count: int) -> bool:
    """Whether the dispatcher knows so many."""
    return len([*samples(service.url, "ray_cluster_leased_images")]) >= count


def _one_by_one(service: Running, num_steps: int, count: int) -> tuple[Row, dict[str, float]]:
    """Return the figures of requests one after the other, and CPU milliseconds by role."""
    with service.client() as client:
        for seed in range(_WARM_UP):
            post_image(client, image_body(seed, num_steps))
        before = cpu_s_by_role()
        replies = [post_image(client, image_body(seed, num_steps)) for seed in range(count)]
        used = cpu_ms_per_request(before, cpu_s_by_role(), count)
    return split([one.total_s for one in replies], [one.timing for one in replies]), used


def split(totals_s: Sequence[float], timings: Sequence[dict[str, float]]) -> Row:
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


def _ms(samples_s: Sequence[float]) -> Figure:
    found = [1e3 * one for one in samples_s]
    return summarise(found) | {"p95": percentile(found, 95)}


def _calls(service: Running, count: int) -> dict[str, Figure]:
    """Measure the ways and works of a request one at a time, on the idle service."""
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    recipe, data = {"prompt": "a red circle"}, os.urandom(12_000)
    with service.client() as client, ImageCoder() as coder:
        calls: dict[str, Callable[[], object]] = {
            "GET /healthz": lambda: client.get("/healthz").raise_for_status(),
            "GET /readyz (three calls of the dispatcher)": lambda: client.get("/readyz").content,
            "PNG in the coder process": lambda: coder.submit(pixels, OutputSpec(), recipe).result(),
            "PNG alone": lambda: encode_image(pixels, OutputSpec(), recipe),
            "base64 of a 64 px PNG": lambda: binascii.b2a_base64(data, newline=False),
        }
        costs = in_turns(calls, count)
    return {name: _ms([one.wall_s for one in found]) for name, found in costs.items()}


def _throughput(subject: Subject, service: Running, rounds: int) -> Row:
    """Return images per second of eight clients and of one in-process runner, block by block."""
    with ThreadPoolExecutor(_CLIENTS) as threads, service.client() as client:

        def by_service() -> None:
            bodies = [image_body(seed, NUM_STEPS) for seed in range(_COUNT)]
            list(threads.map(lambda body: post_image(client, body), bodies))

        by_service()
        ways = {"service": by_service, "runner": lambda: _by_runner(subject, _COUNT)}
        costs = in_turns(ways, rounds)
    rates = {name: [_COUNT / one.wall_s for one in found] for name, found in costs.items()}
    figures = {name: summarise(found) for name, found in rates.items()}
    over = paired_ratio(rates["service"], rates["runner"])
    return {"clients": _CLIENTS, **figures, "service_over_runner": over}


def _by_runner(subject: Subject, count: int) -> None:
    """Have one runner with its three threads make as many images, 8 in flight."""
    queue = make_requests(count, px=64, num_steps=NUM_STEPS, guidance_scale=GUIDANCE)
    lock, done = threading.Lock(), threading.Semaphore(0)
    failures: list[Exception] = []

    def on_event(event: RunnerEvent) -> None:
        if isinstance(event, Broken):
            failures.append(event.error)
        if isinstance(event, Decoded | Broken):
            submit_next()
            done.release()

    runner = EngineRunner(
        subject.model,
        build_engine(subject.model, max_batch=_CLIENTS, clock=time.monotonic),
        clock=time.monotonic,
        max_batch=_CLIENTS,
    )

    def submit_next() -> None:
        with lock:
            request = queue.pop() if queue else None
        if request is not None:
            runner.submit(request, deadline_s=time.monotonic() + 600)

    runner.start(on_event)
    try:
        for _ in range(_CLIENTS):
            submit_next()
        for _ in range(count):
            done.acquire()
    finally:
        runner.stop()
    if failures:
        raise failures[0]
