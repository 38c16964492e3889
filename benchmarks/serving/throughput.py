"""Eight clients at once: images per second of the service and of one in-process runner."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from benchmarks.engine.subject import Subject, make_requests
from benchmarks.serving.running import base_url, image_body, post_image
from benchmarks.settings import GUIDANCE, NUM_STEPS, Report, Settings
from benchmarks.stats import paired_ratio, summarise
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.engine.building import build_engine
from ray_cluster.engine.events import Broken, Decoded, RunnerEvent
from ray_cluster.engine.runner import EngineRunner

CLIENTS = 8
_PER_CLIENT = 3


def measure_throughput(
    subject: Subject, config: ClusterConfig, settings: Settings, report: Report
) -> dict[str, Any]:
    """Return images per second of both, block by block."""
    count = CLIENTS * _PER_CLIENT
    service: list[float] = []
    runner: list[float] = []
    serve = ServiceClients(config)
    try:
        for block in range(settings.throughput_blocks):
            report(block / settings.throughput_blocks, f"{CLIENTS} clients, block {block + 1}")
            pair = [
                (service, lambda: serve.run(count)),
                (runner, lambda: run_in_process(subject, count)),
            ]
            for samples, work in pair if block % 2 == 0 else pair[::-1]:
                samples.append(count / _wall_s(work))
    finally:
        serve.close()
    return {
        "clients": CLIENTS,
        "images_per_block": count,
        "service_images_per_s": summarise(service).as_dict(),
        "runner_images_per_s": summarise(runner).as_dict(),
        "service_over_runner": paired_ratio(service, runner).as_dict(),
    }


class ServiceClients:
    """Threads that each send one request after the other."""

    def __init__(self, config: ClusterConfig) -> None:
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._local = threading.local()
        self._url = base_url(config)
        self._clients: list[httpx.Client] = []
        self.run(CLIENTS)

    def run(self, count: int) -> None:
        """Have ``count`` images made."""
        list(self._threads.map(self._post, range(count)))

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def _post(self, seed: int) -> None:
        if not hasattr(self._local, "client"):
            self._local.client = httpx.Client(base_url=self._url, timeout=300)
            self._clients.append(self._local.client)
        post_image(self._local.client, image_body(seed, num_steps=NUM_STEPS))


def run_in_process(subject: Subject, count: int) -> None:
    """Have one runner with its three threads make as many images, 8 in flight."""
    waiting = make_requests(count, px=64, num_steps=NUM_STEPS, guidance_scale=GUIDANCE)
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
        on_event,
        clock=time.monotonic,
        max_batch=CLIENTS,
    )

    def submit_next() -> None:
        with lock:
            request = waiting.pop() if waiting else None
        if request is not None:
            runner.submit(request, deadline_s=time.monotonic() + 600)

    runner.start()
    try:
        for _ in range(CLIENTS):
            submit_next()
        for _ in range(count):
            done.acquire()
    finally:
        runner.stop()
    if failures:
        raise failures[0]


def _wall_s(work: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
