"""Many LoRAs through HTTP from a slow source: how often they are there, and what waiting costs.

Calls name LoRAs by a Zipf law, as production traces do (SwiftDiffusion, section 2). The same calls
are sent three times: without LoRAs, while every LoRA is still at its source, and again when the
store has had all of them. What the second adds to the third is what fetching costs.
"""

from __future__ import annotations

import http.server
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save

from benchmarks.serving.calls import open_loop
from benchmarks.serving.contenders import OwnContender, Site, free_port
from benchmarks.serving.service_process import running
from benchmarks.settings import Report, Settings
from benchmarks.stats import summarise
from ray_cluster.models.builtin import weights_folder
from ray_cluster.quality.suite import suite_prompts

_BASE, _LIKE = "shapes-sd", "outline"
_FIRST_PORT = 18_600
_ZIPF = 1.1
# of an image that is made alone
_DELAY_SHARE = 0.3
_LOAD = 0.6
_CLIENTS = 8
_TIMEOUT_S = 300.0
_WAYS = ("without LoRAs", "all at their source", "all were fetched once")


class SlowSource(http.server.ThreadingHTTPServer):
    """Serves random LoRAs of the shapes of a built-in one, each after a delay.

    Attributes:
        delay_s: before the first byte.
        num_fetches: by file name.
    """

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Files)
        self.delay_s = 0.0
        self.num_fetches: Counter[str] = Counter()
        file = weights_folder() / _LIKE / "pytorch_lora_weights.safetensors"
        self._tensors = load_file(file)
        self.url = f"http://127.0.0.1:{port}"

    def content(self, name: str) -> bytes:
        """Return a file; the same one for the same name."""
        draw = torch.Generator().manual_seed(int(name.partition(".")[0]))
        changed = {
            key: one * torch.empty_like(one).uniform_(0.5, 1.5, generator=draw)
            for key, one in self._tensors.items()
        }
        return save(changed)


class _Files(http.server.BaseHTTPRequestHandler):
    server: SlowSource

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self.server.num_fetches[self.path] += 1
        time.sleep(self.server.delay_s)
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        content = self.server.content(self.path.strip("/"))
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def slow_source() -> Iterator[SlowSource]:
    """A source that runs within the block."""
    with SlowSource(free_port(_FIRST_PORT)) as source:
        thread = threading.Thread(target=source.serve_forever, daemon=True)
        thread.start()
        try:
            yield source
        finally:
            source.shutdown()
            thread.join()


@dataclass(frozen=True, kw_only=True)
class LoraContender(OwnContender):
    """The service with one replica and a store."""

    source_url: str

    def config(self, site: Site, port: int) -> dict[str, Any]:
        """Return the service's configuration."""
        loras = {"folder": str(site.folder / "loras"), "sources": [self.source_url]}
        limits = {"limits": {"max_queued_images": 10_000, "max_queue_s": 1e6}, "loras": loras}
        return super().config(site, port) | limits


def measure(settings: Settings, report: Report) -> dict[str, Any]:
    """Run the service, and measure it."""
    report(0.0, "starting Ray and Serve")
    with slow_source() as source, tempfile.TemporaryDirectory() as folder:
        contender = LoraContender(what="LoRAs", source_url=source.url)
        log = Path(folder) / "log"
        with running(contender, dtype="float32", alone_s={}, log=log) as url:
            alone_s = _alone_s(url)
            source.delay_s = _DELAY_SHARE * alone_s
            names = _register(url, source, settings.lora_count)
            chosen = _by_zipf(names, settings.lora_calls)
            per_s = _LOAD * _capacity(url, names[:_CLIENTS], settings.lora_warm_s)
            # what the capacity was measured with is no secret any more
            chosen = [name for name in chosen if name not in names[:_CLIENTS]] or chosen
            rows = []
            for index, way in enumerate(_WAYS):
                report(0.2 + 0.2 * index, way)
                fetched = source.num_fetches.total()
                ended = _poisson(url, [None] * len(chosen) if index == 0 else chosen, per_s)
                rows.append(_row(way, ended, len(set(chosen)), source, fetched))
            report(0.85, "peers of cold LoRAs")
            peers = _peers(url, source, settings)
    return {
        "what": f"{len(chosen)} calls of 64 px at {_LOAD:g} of the capacity with LoRAs, each with "
        f"one of {settings.lora_count} by a Zipf law of {_ZIPF:g}; the source waits "
        f"{1e3 * _DELAY_SHARE * alone_s:.0f} ms, {100 * _DELAY_SHARE:.0f} % of an image alone",
        "tables": {
            "calls with LoRAs": rows,
            "steps of images without LoRAs, while others are fetched and converted": peers,
        },
        "problems": [
            f"{row['failed']} calls failed: {row['way']}" for row in rows if row["failed"]
        ],
    }


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=None))


def _make(client: httpx.Client, number: int, lora: str | None) -> dict[str, Any]:
    prompts = suite_prompts("easy", 100)
    body: dict[str, Any] = {"prompt": prompts[number % 100].caption, "seed": number, "slo_s": 600}
    if lora is not None:
        body["loras"] = [{"name": lora, "scale": 0.7}]
    reply = client.post("/v1/images/generations", json=body).raise_for_status().json()
    timing: dict[str, Any] = reply["data"][0]["timing"]
    return timing


def _alone_s(url: str) -> float:
    with _client(url) as client:
        found = [_make(client, number, None)["total_s"] for number in range(8)]
    return float(np.median(found))


def _register(
    url: str, source: SlowSource, count: int, first: int = 0, *, pinned: bool = False
) -> list[str]:
    names = [f"style-{number:03}" for number in range(first, first + count)]
    with _client(url) as client:
        for number, name in enumerate(names, first):
            where = f"{source.url}/{number}.safetensors"
            body = {"name": name, "base": _BASE, "source": where, "pinned": pinned}
            client.post("/v1/loras", json=body).raise_for_status()
    return names


def _by_zipf(names: Sequence[str], count: int) -> list[str]:
    draw = np.random.default_rng(11)
    weights = np.arange(1, len(names) + 1) ** -_ZIPF
    # the first names are no more popular than others
    order = draw.permutation(len(names))
    drawn = draw.choice(order, size=count, p=weights / weights.sum())
    return [names[index] for index in drawn]


def _capacity(url: str, names: Sequence[str], duration_s: float) -> float:
    """Return images per second by many clients, each with a LoRA of its own."""
    stop, counts = threading.Event(), [0] * len(names)

    def work(number: int) -> None:
        with _client(url) as client:
            while not stop.is_set():
                _make(client, counts[number], names[number])
                counts[number] += 1

    with ThreadPoolExecutor(len(names)) as pool:
        calls = [pool.submit(work, number) for number in range(len(names))]
        # once the LoRAs are there
        while min(counts) < 1:
            time.sleep(0.05)
        before, started_s = sum(counts), time.perf_counter()
        time.sleep(duration_s)
        per_s = (sum(counts) - before) / (time.perf_counter() - started_s)
        stop.set()
        for call in calls:
            call.result()
    return per_s


def _poisson(url: str, loras: Sequence[str | None], per_s: float) -> list[dict[str, Any] | None]:
    """Send calls at random instants; return what each took, None for one that failed."""
    gaps_s = np.random.default_rng(7).exponential(1 / per_s, len(loras))
    with _client(url) as client:
        return open_loop(
            np.cumsum(gaps_s).tolist(), lambda number: _make(client, number, loras[number])
        )


def _row(
    way: str, ended: Sequence[dict[str, Any] | None], distinct: int, source: SlowSource, before: int
) -> dict[str, Any]:
    made = [one for one in ended if one is not None]
    fetched = source.num_fetches.total() - before
    waits_s = [one["queue_s"] for one in made]
    totals_s = [one["total_s"] for one in made]
    return {
        "way": way,
        "different LoRAs": 0 if way == _WAYS[0] else distinct,
        "fetched": fetched,
        "hits, %": round(100 * (1 - fetched / len(ended)), 1),
        "waited, mean s": round(float(np.mean(waits_s)), 3),
        "total, p50 s": round(float(np.percentile(totals_s, 50)), 3),
        "total, p95 s": round(float(np.percentile(totals_s, 95)), 3),
        "failed": len(ended) - len(made),
    }


def _peers(url: str, source: SlowSource, settings: Settings) -> list[dict[str, Any]]:
    """Return step times of images without LoRAs, in turns with and without LoRAs on their way."""
    found: dict[str, list[float]] = {"nothing is fetched": [], "LoRAs are fetched": []}
    stop = threading.Event()

    def work(number: int) -> None:
        with _client(url) as client:
            while not stop.is_set():
                _make(client, number, None)

    first = settings.lora_count
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(work, number) for number in range(4)]
        time.sleep(1.0)
        for _ in range(settings.lora_rounds):
            for way, times in found.items():
                begin = _steps(url)
                if way != "nothing is fetched":
                    _register(url, source, settings.lora_cold, first, pinned=True)
                    first += settings.lora_cold
                time.sleep(settings.lora_warm_s / 2)
                times.append(_mean_ms(begin, _steps(url)))
        stop.set()
        for call in calls:
            call.result()
    return [
        {"while": way, "step, ms": summarise(times).as_dict(), "rounds": len(times)}
        for way, times in found.items()
    ]


def _steps(url: str) -> tuple[float, float]:
    """Return how many steps there were, and their seconds."""
    found = {"_count": 0.0, "_sum": 0.0}
    text = httpx.get(f"{url}/metrics", timeout=_TIMEOUT_S).raise_for_status().text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            for end in found:
                if sample.name == f"ray_cluster_step_seconds{end}":
                    found[end] += sample.value
    return found["_count"], found["_sum"]


def _mean_ms(begin: tuple[float, float], end: tuple[float, float]) -> float:
    count, seconds = (last - first for first, last in zip(begin, end, strict=True))
    return 1e3 * seconds / max(1.0, count)
