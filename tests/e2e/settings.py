"""Settings of a running service, changed as an operator does; and who must stay as they are."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.e2e.service import API_KEY, REPLICA_PROCESS, Service, image_request

PATIENCE_S = 180.0
NUM_PROCESSES = {
    "ray::ServeReplica:front:Gateway": 2,
    "ray::ServeReplica:front:Dispatcher": 1,
    REPLICA_PROCESS: 2,
}
DRAFT = {"name": "draft", "model": "shapes-sd-light", "num_cpus": 0.1, "max_px": 128, "min_px": 64}


class Document:
    """The watched file of a service."""

    def __init__(self, service: Service) -> None:
        self.path = service.folder / "service.yaml"
        self._original = self.path.read_text()

    def content(self) -> dict[str, Any]:
        """Return what is in it."""
        found: dict[str, Any] = yaml.safe_load(self.path.read_text())
        return found

    def num_replicas(self) -> int:
        """Return how many replicas it asks for, of every kind."""
        content = self.content()
        sections = ("pools", "discriminators", "controlnets", "upscalers")
        return sum(one.get("replicas", 1) for name in sections for one in content.get(name, []))

    def edit(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change it as by hand."""
        content = self.content()
        change(content)
        self.write(yaml.safe_dump(content))

    def write(self, text: str) -> None:
        """Replace it."""
        self.path.write_text(text)

    def restore(self) -> None:
        """Make it what it was."""
        self.write(self._original)


def ray_address(service: Service) -> str:
    """Return the address that ``serve`` says when all replicas run, a little after it is ready."""
    pattern = re.compile(r"^\s*Ray\s+(\S+:\d+)$", re.MULTILINE)
    wait_for(lambda: pattern.search(service.log.read_text()) is not None, "serve's report")
    found = pattern.search(service.log.read_text())
    assert found is not None
    return found[1]


def settings_command(service: Service, *words: str | Path) -> str:
    """Run ``ray-cluster settings``; return all that it writes."""
    program = Path(sys.executable).with_name("ray-cluster")
    done = subprocess.run(
        [str(program), "settings", *map(str, words), "--address", ray_address(service)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def identities(service: Service) -> dict[str, set[int]]:
    """Return the process ids of the front and the first pool, by process name.

    The service is ready with its first replica: the others are waited for. Ray gives a process
    another name for the time of some calls, so one look that finds all of them counts.
    """
    found: dict[str, set[int]] = {}

    def are_all_there() -> bool:
        for name in NUM_PROCESSES:
            found[name] = {process.pid for process in service.processes(name)}
        return {name: len(pids) for name, pids in found.items()} == NUM_PROCESSES

    wait_for(are_all_there, "all processes")
    return found


def call(service: Service, key: str = API_KEY, **fields: Any) -> httpx.Response:
    """Ask for one small image."""
    return httpx.post(
        f"{service.url}/v1/images/generations",
        json=image_request(num_inference_steps=4, slo_s=600, **fields),
        headers={"Authorization": f"Bearer {key}"},
        timeout=120,
    )


def wait_for(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> float:
    """Wait until something is so; return the seconds that it took."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() < started_s + patience_s, f"waited in vain for {what}"
        time.sleep(0.1)
    return time.monotonic() - started_s


def is_answered(service: Service, status: int, **options: Any) -> Callable[[], bool]:
    """Whether several calls in a row, on whichever gateways, have one status."""
    return lambda: all(call(service, **options).status_code == status for _ in range(6))


def is_admitted(service: Service, key: str, status: int = 200) -> Callable[[], bool]:
    """Whether calls with a key have one status, on whichever gateways; no image is made."""

    def ask() -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{service.url}/v1/models", headers=headers, timeout=60).status_code

    return lambda: all(ask() == status for _ in range(8))


class Clients:
    """Clients that call all the time; a call that fails is kept.

    Attributes:
        failed: what went wrong.
        num_calls: how many were answered with an image.
    """

    def __init__(self, service: Service, count: int) -> None:
        self._service = service
        self._count = count
        self._ending = threading.Event()
        self.failed: list[str] = []
        self.num_calls = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Call within the block."""
        with ThreadPoolExecutor(self._count) as pool:
            clients: list[Future[int]] = [
                pool.submit(self._run, seed) for seed in range(self._count)
            ]
            try:
                yield
            finally:
                self._ending.set()
                self.num_calls = sum(client.result() for client in clients)

    def _run(self, seed: int) -> int:
        num_calls = 0
        while not self._ending.is_set():
            try:
                reply = call(self._service, seed=seed)
            except httpx.HTTPError as error:
                self.failed.append(repr(error))
                continue
            if reply.status_code == 200:
                num_calls += 1
            else:
                self.failed.append(reply.text)
        return num_calls


def serve_file(service: Service) -> dict[str, Any]:
    """Return Serve's own config file of what is in the watched one."""
    program = Path(sys.executable).with_name("ray-cluster")
    done = subprocess.run(
        [str(program), "config", str(service.folder / "service.yaml"), "--serve-deploy"],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    found: dict[str, Any] = yaml.safe_load(done.stdout)
    return found


def all_run(service: Service) -> bool:
    """Whether Serve says that all applications run."""
    reply = httpx.get(f"{service.dashboard_url}/api/serve/applications/", timeout=30)
    applications = reply.json()["applications"].values()
    return all(one["status"] == "RUNNING" for one in applications)
