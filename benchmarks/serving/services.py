"""Contenders as a user runs them, each a process that SIGTERM stops, and calls of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import httpx
import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from benchmarks.baselines.settings import BaselineSettings, Batching
from benchmarks.harness import GUIDANCE, MODEL
from benchmarks.machine import ROOT
from ray_cluster.config.loading import load_config

T = TypeVar("T")
Config = dict[str, Any]
# others may look for ports at the same time
_FIRST_PORT = 20_000 + 10 * (os.getpid() % 1000)
TIMEOUT_S = 300.0
_START_S, _STOP_S = 300.0, 90.0
# for its processes, once it has ended
_LEAVE_S = 10.0
# calls under way at once
_MOST_CALLS = 256
OPEN_LIMITS = {"max_queued_images": 10_000, "max_queue_s": 1e6}


class Counts(NamedTuple):
    """What a service counts of the requests that it has accepted."""

    accepted: int
    completed: int
    dropped: int
    failed: int

    @property
    def open(self) -> int:
        """Accepted, and not ended."""
        return self.accepted - self.completed - self.dropped - self.failed

    def since(self, before: Counts) -> Counts:
        """Return the difference of two readings."""
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Contender:
    """The service, with one pool of one replica unless it is changed.

    Attributes:
        what: it is, for readers of the report.
        change: makes its configuration of the usual one.
        pool: what its pool's section has beside the usual.
        dtype: of its model.
        call: fields of its calls beside the image and the deadline.
        omits: fields that its calls leave out.
        simulated_as: its policy in the simulator; empty for none.
    """

    what: str = "the service"
    change: Callable[[Config], Config] = dict
    pool: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    call: Mapping[str, Any] = field(
        default_factory=lambda: {"when_late": "refuse", "metadata": False}
    )
    omits: Collection[str] = ()
    simulated_as: str = ""

    def config(self, folder: Path, port: int) -> Config:
        """Return its configuration; what it stores goes to a folder."""
        store = {name: str(folder / name) for name in ("results", "states", "inputs")}
        return self.change(
            {
                "http": {"port": port},
                "ray": _ray(folder),
                "storage": {"jobs": f"sqlite:///{folder}/jobs.db", **store},
                "loras": {"folder": str(folder / "loras")},
                "pools": [self.pool_section()],
            }
        )

    def pool_section(self) -> Config:
        """Return its one pool, as a configuration has it."""
        default = load_config().pools[0].model_dump(mode="json")
        own = {"model": MODEL, "replicas": 1, "num_threads": 1, "dtype": self.dtype}
        return {**default, **own, **self.pool}

    def command(self, folder: Path, port: int) -> list[str]:
        """Write its settings; return how it is started."""
        path = folder / "service.yaml"
        path.write_text(yaml.safe_dump(self.config(folder, port)), encoding="utf-8")
        return ["ray_cluster.cli", "serve", str(path), "--quiet"]

    def counts(self, url: str) -> Counts:
        """Return what the running service counts."""
        events: Counter[str] = Counter()
        for sample in samples(url, "ray_cluster_images_total"):
            events[sample.labels["event"]] += int(sample.value)
        failed = sum(events[name] for name in ("error", "invalid", "aborted", "lost"))
        return Counts(events["accepted"], events["completed"], 0, failed)


@dataclass(frozen=True, kw_only=True)
class Baseline(Contender):
    """One Serve deployment around the diffusers pipeline.

    Attributes:
        alone_s: seconds of an image alone by its shape's name, as far as they are known yet.
    """

    call: Mapping[str, Any] = field(default_factory=dict)
    batching: Batching
    is_guarded: bool = False
    alone_s: Mapping[str, float] = field(default_factory=dict)

    def command(self, folder: Path, port: int) -> list[str]:
        settings = BaselineSettings(
            batching=self.batching,
            is_guarded=self.is_guarded,
            http_port=port,
            ray=_ray(folder),
            dtype=self.dtype,
            alone_s=dict(self.alone_s),
        )
        path = folder / "baseline.json"
        path.write_text(settings.model_dump_json(), encoding="utf-8")
        return ["benchmarks.baselines", str(path)]

    def counts(self, url: str) -> Counts:
        found = json.loads(_get(f"{url}/counts"))
        return Counts(*(found.get(name, 0) for name in Counts._fields))


class Running(NamedTuple):
    """A contender that runs: its URL, and the folder of its settings and of what it stores."""

    url: str
    folder: Path

    def client(self, key: str = "") -> httpx.Client:
        """Return a client without a bound on connections."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, limits=limits, headers=headers)


@contextmanager
def running(contender: Contender) -> Iterator[Running]:
    """A contender that runs within the block, and of which nothing runs after it.

    Raises:
        RuntimeError: it did not start, or did not stop by itself.
    """
    # the paths of Ray's sockets must stay short
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder, port = Path(name), free_port(_FIRST_PORT)
        (folder / "ray").mkdir()
        command = [sys.executable, "-m", *contender.command(folder, port)]
        log, found = folder / "log", Running(f"http://127.0.0.1:{port}", folder)
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=_environment(),
                start_new_session=True,
            )
        left: list[str] = []
        try:
            is_up = until(
                lambda: process.poll() is not None or _is_ready(found.url), most_s=_START_S
            )
            if not is_up or process.poll() is not None:
                tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise RuntimeError(f"{' '.join(command)}: not ready, or ended\n{tail}")
            yield found
        finally:
            left = _stop(process)
            shutil.rmtree(folder / "ray", ignore_errors=True)
        if left:
            raise RuntimeError(f"did not stop by itself and was killed: {', '.join(left)}")


def _ray(folder: Path) -> Config:
    return {
        "auth": "disabled",
        "num_cpus": max(2, os.cpu_count() or 2),
        "include_dashboard": False,
        "metrics_port": free_port(_FIRST_PORT + 5),
        "temp_dir": str(folder / "ray"),
    }


def _environment() -> dict[str, str]:
    path = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    own |= {"PYTHONPATH": os.pathsep.join(filter(None, path)), "RAY_USAGE_STATS_ENABLED": "0"}
    return {**os.environ, **own}


def _is_ready(url: str) -> bool:
    return httpx.get(f"{url}/readyz", timeout=5.0).status_code == httpx.codes.OK


def _stop(process: subprocess.Popen[bytes]) -> list[str]:
    """Stop a service and all its processes; return the names of those that had to be killed."""
    if process.poll() is not None:
        return []
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGTERM)
    left = []
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        left.append("the service")
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, timeout=_LEAVE_S)
    for one in alive:
        left.append(one.name())
        one.kill()
    psutil.wait_procs(alive, timeout=_LEAVE_S)
    return left


def until(condition: Callable[[], bool], *, most_s: float, every_s: float = 0.2) -> bool:
    """Wait for a condition; return whether it came true in time. An HTTP error is a no."""
    end_s = time.monotonic() + most_s
    while time.monotonic() < end_s:
        with suppress(httpx.HTTPError):
            if condition():
                return True
        time.sleep(every_s)
    return False


def free_port(first: int) -> int:
    """Return the first port from there on that nothing listens on."""
    for port in range(first, first + 50):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise RuntimeError(f"no free port from {first} on")


def samples(url: str, *names: str) -> Iterator[Sample]:
    """Yield the samples of metrics by their names."""
    for family in text_string_to_metric_families(_get(f"{url}/metrics")):
        yield from (sample for sample in family.samples if sample.name in names)


def _get(url: str) -> str:
    return httpx.get(url, timeout=TIMEOUT_S).raise_for_status().text


class Reply(NamedTuple):
    """The seconds that a call took at the client, and its first image."""

    total_s: float
    image: dict[str, Any]

    @property
    def timing(self) -> dict[str, float]:
        """Seconds of the parts of the image."""
        found: dict[str, float] = self.image["timing"]
        return found


def image_body(seed: int, num_steps: int, **fields: Any) -> dict[str, Any]:
    """Return the body of a generation call of one image, 64 px unless a field says otherwise."""
    return {
        "prompt": "a large red circle in the center on a black background",
        "size": "64x64",
        "seed": seed,
        "num_inference_steps": num_steps,
        "guidance_scale": GUIDANCE,
        **fields,
    }


def post_image(client: httpx.Client, body: Mapping[str, Any]) -> Reply:
    """Have an image made.

    Raises:
        httpx.HTTPStatusError: the service refused or failed.
    """
    started_s = time.perf_counter()
    reply = client.post("/v1/images/generations", json=body)
    total_s = time.perf_counter() - started_s
    return Reply(total_s, reply.raise_for_status().json()["data"][0])


def open_loop(instants_s: Sequence[float], send: Callable[[int], T]) -> list[T | None]:
    """Send a call at each instant from now, by its number, whatever became of the others.

    Returns:
        What ``send`` returned; None for a call that failed, or was refused.
    """

    def one(number: int) -> T | None:
        with suppress(httpx.HTTPError):
            return send(number)
        return None

    with ThreadPoolExecutor(_MOST_CALLS) as pool:
        calls, started_s = [], time.perf_counter()
        for number, at_s in enumerate(instants_s):
            time.sleep(max(0.0, started_s + at_s - time.perf_counter()))
            calls.append(pool.submit(one, number))
        return [call.result() for call in calls]


Act = Callable[[httpx.Client, int, int], object]
"""A client calls it again and again with its number and that of the call."""


@contextmanager
def calling(service: Running, count: int, act: Act, *, key: str = "") -> Iterator[list[int]]:
    """Clients that call again and again within the block; yields how often each one has.

    Raises:
        Exception: of a client, at the end.
    """
    is_over, made = threading.Event(), [0] * count

    def work(number: int) -> None:
        with service.client(key) as client:
            while not is_over.is_set():
                act(client, number, made[number])
                made[number] += 1

    with ThreadPoolExecutor(max(1, count)) as pool:
        ends = [pool.submit(work, number) for number in range(count)]
        try:
            yield made
        finally:
            is_over.set()
        for one in ends:
            one.result()


def rate_per_s(service: Running, count: int, act: Act, seconds: float) -> float:
    """Return how many calls a second so many clients get, once each has had one."""
    with calling(service, count, act) as made:
        until(lambda: min(made) > 0, most_s=TIMEOUT_S, every_s=0.05)
        before, started_s = sum(made), time.perf_counter()
        time.sleep(seconds)
        return (sum(made) - before) / (time.perf_counter() - started_s)
