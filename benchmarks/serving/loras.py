"""Many LoRAs through HTTP from a slow source: how often they are there, and what waiting costs.

Calls name LoRAs by a Zipf law, as production traces do (SwiftDiffusion, section 2). The same calls
are sent three times: without LoRAs, while every LoRA is still at its source, and again when the
store has had all of them. What the second adds to the third is what fetching costs.
"""

from __future__ import annotations

import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
import numpy as np
import torch
from safetensors.torch import load_file, save

from benchmarks.figures import percentile, summarise
from benchmarks.harness import Study
from benchmarks.serving.services import (
    OPEN_LIMITS,
    Contender,
    Running,
    calling,
    free_port,
    open_loop,
    post_image,
    rate_per_s,
    running,
    samples,
)
from ray_cluster.models.builtin import weights_folder
from ray_cluster.quality.suite import suite_prompts

_BASE, _LIKE = "shapes-sd", "outline"
_FIRST_PORT = 18_600
_ZIPF = 1.1
# of an image that is made alone
_DELAY_SHARE = 0.3
_LOAD = 0.6
_CLIENTS = 8
_WAYS = ("without LoRAs", "all at their source", "all were fetched once")
_STEP = "ray_cluster_step_seconds"


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
        self._tensors = load_file(weights_folder() / _LIKE / "pytorch_lora_weights.safetensors")
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


def measure(study: Study) -> None:
    """Run the service, and measure it."""
    count, warm_s = study.pick(200, 12), study.pick(16.0, 2.0)
    with slow_source() as source:
        own = {"limits": OPEN_LIMITS}

        def change(usual: dict[str, object]) -> dict[str, object]:
            loras = usual["loras"]
            assert isinstance(loras, dict)
            return usual | own | {"loras": {**loras, "sources": [source.url]}}

        with running(Contender(what="LoRAs", change=change)) as service, service.client() as client:
            alone_s = float(np.median([_make(client, n, None)["total_s"] for n in range(8)]))
            source.delay_s = _DELAY_SHARE * alone_s
            names = _register(client, source, count)
            drawn, known = _by_zipf(names, study.pick(300, 16)), names[:_CLIENTS]
            # what the capacity is measured with is no secret any more
            chosen = [name for name in drawn if name not in known] or drawn

            def act(own: httpx.Client, number: int, call: int) -> None:
                _make(own, call, known[number])

            per_s = _LOAD * rate_per_s(service, len(known), act, warm_s)
            for way in study.each(_WAYS):
                _send(study, way, client, source, chosen, per_s)
            study.say(0.85, "peers of cold LoRAs")
            rounds, cold = study.pick(8, 2), study.pick(4, 1)
            _peers(study, service, source, rounds=rounds, cold=cold, pause_s=warm_s / 2)
    study.found["what"] = (
        f"{len(chosen)} calls of 64 px at {_LOAD:g} of the capacity with LoRAs, each with one of "
        f"{count} by a Zipf law of {_ZIPF:g}; the source waits {1e3 * source.delay_s:.0f} ms, "
        f"{100 * _DELAY_SHARE:.0f} % of an image alone"
    )


def _make(client: httpx.Client, number: int, lora: str | None) -> dict[str, float]:
    prompts = suite_prompts("easy", 100)
    body = {"prompt": prompts[number % 100].caption, "seed": number, "slo_s": 600}
    loras = {} if lora is None else {"loras": [{"name": lora, "scale": 0.7}]}
    return post_image(client, body | loras).timing


def _register(
    client: httpx.Client, source: SlowSource, count: int, first: int = 0, *, pinned: bool = False
) -> list[str]:
    names = [f"style-{number:03}" for number in range(first, first + count)]
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
    return [names[index] for index in draw.choice(order, size=count, p=weights / weights.sum())]


def _send(
    study: Study,
    way: str,
    client: httpx.Client,
    source: SlowSource,
    chosen: Sequence[str],
    per_s: float,
) -> None:
    """Send calls at random instants; add what they took."""
    before, has_loras = source.num_fetches.total(), way != _WAYS[0]
    gaps_s = np.random.default_rng(7).exponential(1 / per_s, len(chosen))

    def send(number: int) -> dict[str, float]:
        return _make(client, number, chosen[number] if has_loras else None)

    ended = open_loop(np.cumsum(gaps_s).tolist(), send)
    made, fetched = [one for one in ended if one], source.num_fetches.total() - before
    totals_s = [one["total_s"] for one in made]
    columns = {
        "different LoRAs": len(set(chosen)) * has_loras,
        "fetched": fetched,
        "hits, %": round(100 * (1 - fetched / len(ended)), 1),
        "waited, mean s": round(float(np.mean([one["queue_s"] for one in made])), 3),
        "total, p50 s": round(percentile(totals_s, 50), 3),
        "total, p95 s": round(percentile(totals_s, 95), 3),
        "failed": len(ended) - len(made),
    }
    study.row("calls with LoRAs", way=way, **columns)
    if columns["failed"]:
        study.fail(f"{columns['failed']} calls failed: {way}")


def _peers(
    study: Study, service: Running, source: SlowSource, *, rounds: int, cold: int, pause_s: float
) -> None:
    """Add step times of images without LoRAs, in turns with and without LoRAs on their way."""
    found: dict[str, list[float]] = {"nothing is fetched": [], "LoRAs are fetched": []}
    first = 10_000
    with (
        calling(service, 4, lambda client, number, _call: _make(client, number, None)),
        service.client() as client,
    ):
        time.sleep(1.0)
        for _ in range(rounds):
            for way, times_ms in found.items():
                begin = _steps(service)
                if way != "nothing is fetched":
                    _register(client, source, cold, first, pinned=True)
                    first += cold
                time.sleep(pause_s)
                count, seconds = (
                    end - one for one, end in zip(begin, _steps(service), strict=True)
                )
                times_ms.append(1e3 * seconds / max(1.0, count))
    title = "steps of images without LoRAs, while others are fetched and converted"
    for way, times_ms in found.items():
        study.row(title, **{"while": way, "step, ms": summarise(times_ms), "rounds": rounds})


def _steps(service: Running) -> tuple[float, float]:
    """Return how many steps there were, and their seconds."""
    names = (f"{_STEP}_count", f"{_STEP}_sum")
    found = Counter[str]()
    for sample in samples(service.url, *names):
        found[sample.name] += sample.value  # type: ignore[assignment]
    return found[names[0]], found[names[1]]
