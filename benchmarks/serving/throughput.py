"""Eight clients at once: images per second of the service and of one in-process runner."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.engine.subject import Subject, make_requests
from benchmarks.serving.calls import image_body, post_image
from benchmarks.settings import GUIDANCE, NUM_STEPS
from benchmarks.stats import paired_ratio, summarise
from benchmarks.stopwatch import in_turns
from ray_cluster.engine.stages.building import build_engine
from ray_cluster.engine.stages.events import Broken, Decoded, RunnerEvent
from ray_cluster.engine.stages.runner import EngineRunner

CLIENTS = 8
_COUNT = 3 * CLIENTS


def measure_throughput(subject: Subject, url: str, rounds: int) -> dict[str, Any]:
    """Return images per second of both, block by block."""
    with (
        ThreadPoolExecutor(CLIENTS) as threads,
        httpx.Client(base_url=url, timeout=300) as client,
    ):

        def post(seed: int) -> None:
            post_image(client, image_body(seed, num_steps=NUM_STEPS))

        def by_service(count: int = _COUNT) -> None:
            list(threads.map(post, range(count)))

        by_service(CLIENTS)
        ways = {"service": by_service, "runner": lambda: _by_runner(subject, _COUNT)}
        costs = in_turns(ways, rounds)
    rates = {name: [_COUNT / one.wall_s for one in found] for name, found in costs.items()}
    return {
        "clients": CLIENTS,
        **{name: summarise(found).as_dict() for name, found in rates.items()},
        "service_over_runner": paired_ratio(rates["service"], rates["runner"]).as_dict(),
    }


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
        build_engine(subject.model, max_batch=CLIENTS, clock=time.monotonic),
        clock=time.monotonic,
        max_batch=CLIENTS,
    )

    def submit_next() -> None:
        with lock:
            request = queue.pop() if queue else None
        if request is not None:
            runner.submit(request, deadline_s=time.monotonic() + 600)

    runner.start(on_event)
    try:
        for _ in range(CLIENTS):
            submit_next()
        for _ in range(count):
            done.acquire()
    finally:
        runner.stop()
    if failures:
        raise failures[0]
