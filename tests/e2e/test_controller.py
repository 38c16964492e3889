"""The controller of a running service: replicas come with load, go with silence, and nothing is
lost, whoever dies or meddles meanwhile."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.jobs import VICTIMS
from tests.e2e.service import HEADERS, Service, image_request, running
from tests.e2e.settings import serve_file

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
}
CONTROL = {"enabled": True, "period_s": 1.0, "dwell_s": 10.0}


@pytest.fixture(params=["endpoint", "policy"])
def scaling(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def service(scaling: str, tmp_path: Path) -> Iterator[Service]:
    with running(tmp_path, **SECTIONS, control=CONTROL | {"scaling": scaling}) as one:
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


def target(service: Service) -> int | None:
    """Return how many replicas Serve is to keep; None while it deploys the pool."""
    found = httpx.get(f"{service.dashboard_url}/api/serve/applications/", timeout=10).json()
    deployment = found["applications"]["draft"]["deployments"].get("BaseModel")
    return None if deployment is None else int(deployment["target_num_replicas"])


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


def scale_by_hand(service: Service) -> httpx.Response:
    url = f"{service.dashboard_url}/api/v1/applications/draft/deployments/BaseModel/scale"
    return httpx.post(url, json={"target_num_replicas": 2}, timeout=10)


def meddle_by_hand(service: Service) -> int:
    """Change the count; return it."""
    # healed within a round: that it was ever there, the history of plans says
    assert scale_by_hand(service).status_code == 200
    return 2


def meddle_by_deploying(service: Service) -> int:
    """Deploy the pool again, as the scale endpoint refuses; return its replicas at the start."""
    assert scale_by_hand(service).status_code == 412
    (pool,) = (one for one in serve_file(service)["applications"] if one["name"] == "draft")
    url = f"{service.dashboard_url}/api/serve/applications/"
    assert httpx.put(url, json={"applications": [pool]}, timeout=60).status_code == 200
    until(lambda: target(service) == 1, "the deployment has come")
    return 1


MEDDLERS = {"endpoint": meddle_by_hand, "policy": meddle_by_deploying}


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replicas_follow_demand_whoever_dies_or_meddles(service: Service, scaling: str) -> None:
    with load(service) as statuses:
        until(lambda: target(service) == 2, "a second replica is planned")
        # serving goes on without a controller, and with the next one
        (first,) = service.processes(VICTIMS["controller"], may_be_busy=True)
        first.kill()
        until(lambda: num_ready(service) == 2, "the second replica has come")
    assert len(statuses) >= NUM_CLIENTS
    assert set(statuses) == {200}
    until(lambda: service.processes(VICTIMS["controller"]), "another controller has come")
    until(lambda: target(service) == 0, "silence has stopped all replicas")
    count = MEDDLERS[scaling](service)
    until(lambda: target(service) == 0, "a count changed by somebody else is healed")
    until(lambda: num_ready(service) == 0, "no replica is left")
    assert service.is_ready()
    # a call for a model at zero waits until a replica has come
    assert generate(service, seed=99) == 200
    plan = httpx.get(f"{service.url}/v1/plan", headers=HEADERS, timeout=10).json()
    assert plan["state"] == "applied"
    changes = [change for one in plan["history"] for change in one["actions"]]
    assert {"draft: 1 to 2 replicas", f"draft: {count} to 0 replicas"} <= set(changes)
