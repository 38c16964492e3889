"""The controller of a running service: replicas come with load, go with silence, and nothing is
lost, whoever dies or meddles meanwhile."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.service import HEADERS, Service, image_request, running

CONTROLLER = "ray::ServeReplica:controller:Controller"
# whose images one replica does not make soon
NUM_CLIENTS = 16
NUM_STEPS = 30
PATIENCE_S = 240.0

POOL = {
    "name": "draft",
    "model": "shapes-sd",
    "num_cpus": 0.5,
    "max_batch": 1,
    "max_in_flight": 4,
    "min_px": 32,
    "max_px": 128,
    "min_replicas": 0,
    "max_replicas": 2,
    "defaults": {"size": "128x128", "num_inference_steps": NUM_STEPS, "guidance_scale": 2.0},
}
SECTIONS: dict[str, Any] = {
    "pools": [POOL],
    "discriminators": [],
    "cascades": [],
    "loras": {"num_stores": 0},
    "limits": {"max_queued_images": 2 * NUM_CLIENTS},
    "control": {"enabled": True, "period_s": 1.0, "dwell_s": 10.0},
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("controller"), **SECTIONS) as one:
        yield one


def until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain until {what}"
        time.sleep(0.2)


def num_ready(service: Service) -> int:
    """Return how many replicas the gateway knows of."""
    text = httpx.get(f"{service.url}/metrics", headers=HEADERS, timeout=10).text
    rows = [line for line in text.splitlines() if line.startswith("ray_cluster_free_places{")]
    return len(rows)


def target(service: Service) -> int:
    """Return how many replicas Serve is to keep."""
    found = httpx.get(f"{service.dashboard_url}/api/serve/applications/", timeout=10).json()
    deployment = found["applications"]["draft"]["deployments"]["BaseModel"]
    return int(deployment["target_num_replicas"])


def generate(service: Service, seed: int) -> int:
    body = image_request(model="draft", seed=seed)
    url = f"{service.url}/v1/images/generations"
    return httpx.post(url, json=body, headers=HEADERS, timeout=150).status_code


@contextmanager
def load(service: Service) -> Iterator[list[int]]:
    """Clients that ask for one image after the other within the block; yield the statuses."""
    statuses: list[int] = []
    is_over = threading.Event()

    def ask(client: int) -> None:
        for number in itertools.count():
            if is_over.is_set():
                return
            statuses.append(generate(service, seed=1000 * client + number))

    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        clients = [threads.submit(ask, client) for client in range(NUM_CLIENTS)]
        try:
            yield statuses
        finally:
            is_over.set()
    for one in clients:
        one.result()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_follow_demand_whoever_dies_or_meddles(service: Service) -> None:
    with load(service) as statuses:
        until(lambda: target(service) == 2, "a second replica is planned")
        # serving goes on without a controller, and with the next one
        (first,) = service.processes(CONTROLLER)
        first.kill()
        until(lambda: num_ready(service) == 2, "the second replica has come")
    assert len(statuses) >= NUM_CLIENTS
    assert set(statuses) == {200}
    until(lambda: service.processes(CONTROLLER), "another controller has come")
    until(lambda: target(service) == 0, "silence has stopped all replicas")
    scale = f"{service.dashboard_url}/api/v1/applications/draft/deployments/BaseModel/scale"
    assert httpx.post(scale, json={"target_num_replicas": 2}, timeout=10).status_code == 200
    assert target(service) == 2
    until(lambda: target(service) == 0, "a count changed by hand is healed")
    until(lambda: num_ready(service) == 0, "no replica is left")
    assert service.is_ready()
    # a call for a model at zero waits until a replica has come
    assert generate(service, seed=99) == 200
    plan = httpx.get(f"{service.url}/v1/plan", headers=HEADERS, timeout=10).json()
    assert plan["state"] == "applied"
    changes = [change for one in plan["history"] for change in one["actions"]]
    assert {"draft: 1 to 2 replicas", "draft: 2 to 0 replicas"} <= set(changes)
