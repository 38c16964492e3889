"""A node goes down under load: its replica is planned away, and back when another node comes."""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import ProxyLocation

from ray_cluster.config.loading import load_config
from ray_cluster.config.slices import front_arguments
from ray_cluster.deployments.service import deploy
from tests.deployments.conftest import NODE

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 200.0
NUM_CLIENTS = 12
POOL = {
    "name": "draft",
    "model": "shapes-sd",
    # more than half of a node's: one replica a node
    "num_cpus": 0.6,
    "max_batch": 1,
    "max_in_flight": 4,
    "min_replicas": 1,
    "max_replicas": 2,
    "defaults": {"size": "128x128", "num_inference_steps": 30, "guidance_scale": 2.0},
}
PROMPT = "a large red circle in the center on a black background"


class Cell:
    """A service, and clients that have one job after the other made by it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._is_over = threading.Event()
        self.jobs: list[str] = []

    def get(self, path: str) -> dict[str, Any] | None:
        """Return what is answered; None while nobody answers."""
        try:
            reply = httpx.get(self.url + path, timeout=10)
        except httpx.HTTPError:
            return None
        found: dict[str, Any] | None = reply.json() if reply.is_success else None
        return found

    def plan(self) -> dict[str, Any]:
        return self.get("/v1/plan") or {"latest": None, "history": []}

    def num_planned(self) -> int | None:
        """Return the replicas of the latest plan; None while there is none."""
        latest = self.plan()["latest"]
        found = [] if latest is None else [one for one in latest["pools"] if one["pool"] == "draft"]
        return found[0]["num_planned"] if found else None

    def changes(self) -> list[str]:
        """Return what was done by the controller, latest first."""
        return [action for one in self.plan()["history"] for action in one["actions"]]

    @contextmanager
    def load(self) -> Iterator[None]:
        """Clients that call within the block; what goes wrong with one is raised after it."""
        with ThreadPoolExecutor(NUM_CLIENTS) as threads:
            clients = [threads.submit(self._work, client) for client in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                self._is_over.set()
        for one in clients:
            one.result()

    def _work(self, client: int) -> None:
        for number in itertools.count():
            if self._is_over.is_set():
                return
            job = self._create(1000 * client + number)
            self.jobs.append(job)
            self.wait_for_end(job)

    def _create(self, seed: int) -> str:
        """Create a job; sent again with its key until it is answered, as a client must."""
        body = {"model": "draft", "prompt": PROMPT, "seed": seed, "slo_s": 600}
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                reply = httpx.post(f"{self.url}/v1/jobs", json=body, headers=headers, timeout=10)
                if reply.is_success:
                    return str(reply.json()["id"])
                assert reply.status_code in {429, 500, 503}, reply.text
            except httpx.HTTPError:
                pass
            assert time.monotonic() < end_s, "no job is accepted"
            time.sleep(0.5)

    def wait_for_end(self, job: str) -> None:
        """Wait until a job is completed, with one image."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            found = self.get(f"/v1/jobs/{job}")
            if found is not None and found["state"] == "completed":
                assert len(found["data"]) == 1
                return
            assert found is None or found["state"] not in {"failed", "cancelled"}, found
            assert time.monotonic() < end_s, found
            time.sleep(0.5)


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain until {what}: {serve.status()}"
        time.sleep(0.5)


def num_running() -> int:
    """Return how many replicas of the model run."""
    application = serve.status().applications.get("draft")
    if application is None:
        return 0
    return sum(one.replica_states.get("RUNNING", 0) for one in application.deployments.values())


def test_what_a_lost_node_had_is_planned_for_the_others(
    cluster: Cluster, free_port: int, tmp_path: Path
) -> None:
    # what every call needs lives on the head node, as in a cluster whose workers come and go
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options={"host": "127.0.0.1", "port": free_port},
    )
    storage = {
        "jobs": f"sqlite:///{tmp_path}/jobs.db",
        "is_shared": True,
        **{name: str(tmp_path / name) for name in ("results", "states", "inputs")},
    }
    config = load_config(
        {
            "pools": [POOL],
            "discriminators": [],
            "cascades": [],
            "storage": storage,
            "http": {"port": free_port},
            "loras": {"folder": str(tmp_path), "num_stores": 0},
            "limits": {"max_queued_images": 4 * NUM_CLIENTS},
            "control": {"enabled": True, "scaling": "policy", "period_s": 1.0, "dwell_s": 5.0},
        }
    )
    deploy(config, front_arguments(config))
    cell = Cell(free_port)
    until(lambda: cell.get("/readyz") is not None, "the service is ready")
    worker = cluster.add_node(**NODE)
    with cell.load():
        until(lambda: num_running() == 2, "a replica runs on either node")
        cluster.remove_node(worker, allow_graceful=False)
        until(lambda: cell.num_planned() == 1, "the lost node is no part of the plan")
        until(lambda: num_running() == 1, "one replica runs")
        cluster.add_node(**NODE)
        until(lambda: num_running() == 2, "the new node has a replica")
    assert len(cell.jobs) >= 2 * NUM_CLIENTS
    for job in cell.jobs:
        cell.wait_for_end(job)
    assert {"draft: 1 to 2 replicas", "draft: 2 to 1 replicas"} <= set(cell.changes())
