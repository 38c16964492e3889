"""What the service adds to one request: HTTP total less what the engine says it worked on it."""

from __future__ import annotations

import time
from typing import Any

import httpx

from benchmarks.serving.processes import cpu_s_by_role
from benchmarks.serving.running import base_url, image_body, post_image
from benchmarks.settings import Report, Settings
from benchmarks.stats import percentile, summarise
from ray_cluster.config.loading import ClusterConfig

_ENGINE_PARTS = ("encode_s", "denoise_s", "decode_s")
_WARM_UP = 3


class SequentialClient:
    """One client, one request after the other."""

    def __init__(self, config: ClusterConfig, settings: Settings) -> None:
        self._config = config
        self._settings = settings

    def run(self, report: Report) -> list[dict[str, Any]]:
        """Measure requests of 2 and of 20 steps."""
        cases = [(2, self._settings.short_requests), (20, self._settings.long_requests)]
        rows = []
        with httpx.Client(base_url=base_url(self._config), timeout=120) as client:
            for index, (num_steps, count) in enumerate(cases):
                report(index / len(cases), f"{count} requests of {num_steps} steps")
                rows.append(self._case(client, num_steps, count))
        return rows

    def _case(self, client: httpx.Client, num_steps: int, count: int) -> dict[str, Any]:
        for seed in range(_WARM_UP):
            post_image(client, image_body(seed, num_steps=num_steps))
        totals: list[float] = []
        timings: list[dict[str, float]] = []
        before = cpu_s_by_role()
        for seed in range(count):
            total_s, timing, _ = post_image(client, image_body(seed, num_steps=num_steps))
            totals.append(total_s)
            timings.append(timing)
        after = cpu_s_by_role()
        return {
            "num_steps": num_steps,
            **split(totals, timings),
            "cpu_ms_per_request_by_role": {
                role: round(1e3 * (used - before.get(role, 0.0)) / count, 2)
                for role, used in sorted(after.items(), key=lambda item: -item[1])
                if used - before.get(role, 0.0) > 0
            },
        }


def split(totals_s: list[float], timings: list[dict[str, float]]) -> dict[str, Any]:
    """Return the overhead per request and where it arises.

    ``overhead`` = HTTP total - encode - denoise - decode, and is the sum of

    - ``lease``: in the dispatcher's queue, until a replica's poll took it,
    - ``code and report``: from the decoded image to the dispatcher's knowledge of it (the coder
      process, the report), and the way of the lease to the replica,
    - ``http``: everything outside the dispatcher: client, proxy, gateway, the calls between them.
    """
    engine = [sum(timing[part] for part in _ENGINE_PARTS) for timing in timings]
    parts_s = {
        "overhead": [total - worked for total, worked in zip(totals_s, engine, strict=True)],
        "lease": [timing["queue_s"] for timing in timings],
        "code_and_report": [
            timing["total_s"] - timing["queue_s"] - worked
            for timing, worked in zip(timings, engine, strict=True)
        ],
        "http": [t - timing["total_s"] for t, timing in zip(totals_s, timings, strict=True)],
        "engine": engine,
        "total": totals_s,
    }
    return {name: quantiles(values) for name, values in parts_s.items()}


def quantiles(samples_s: list[float]) -> dict[str, Any]:
    """Return median with interval, and p95, of one part, in seconds."""
    return {**summarise(samples_s).as_dict(), "p95": percentile(samples_s, 95)}


def probe_parts(config: ClusterConfig, count: int) -> dict[str, Any]:
    """Measure the ways and works of a request one at a time, on the idle service."""
    parts = {"healthz over http": _time_http(config, count)}
    parts |= _time_handle(config, count)
    parts |= _time_coding(count)
    return {name: quantiles(samples) for name, samples in parts.items()}


def _time_http(config: ClusterConfig, count: int) -> list[float]:
    """Client, proxy and gateway alone: a call that asks the dispatcher nothing."""
    with httpx.Client(base_url=base_url(config), timeout=60) as client:
        return _timed(lambda: client.get("/healthz").raise_for_status(), count)


def _time_handle(config: ClusterConfig, count: int) -> dict[str, list[float]]:
    """One call of the dispatcher, as gateways and replicas make it."""
    import asyncio

    from ray_cluster.deployments.links import DispatcherHandle

    client = DispatcherHandle(patience_s=config.dispatch.patience_s).client

    async def calls() -> list[float]:
        samples = []
        for _ in range(count + _WARM_UP):
            started_s = time.perf_counter()
            await client.models()
            samples.append(time.perf_counter() - started_s)
        return samples[_WARM_UP:]

    return {"call of the dispatcher": asyncio.run(calls())}


def _time_coding(count: int) -> dict[str, list[float]]:
    import binascii
    import os

    import numpy as np

    from ray_cluster.imaging.encoder import ImageCoder, encode_image
    from ray_cluster.requests import OutputSpec

    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    recipe, data = {"prompt": "a red circle"}, os.urandom(12_000)
    with ImageCoder() as coder:
        there_and_back = _timed(lambda: coder.submit(pixels, OutputSpec(), recipe).result(), count)
    return {
        "png in the coder process": there_and_back,
        "png alone": _timed(lambda: encode_image(pixels, OutputSpec(), recipe), count),
        "base64 of a 64 px png": _timed(lambda: binascii.b2a_base64(data, newline=False), count),
    }


def _timed(call: Any, count: int) -> list[float]:
    samples = []
    for _ in range(count + _WARM_UP):
        started_s = time.perf_counter()
        call()
        samples.append(time.perf_counter() - started_s)
    return samples[_WARM_UP:]
