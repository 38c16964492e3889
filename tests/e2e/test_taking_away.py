"""Replicas that are taken away under load: nothing is lost, fails, or is made twice."""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import yaml

from tests.e2e.jobs import (
    PATIENCE_S,
    Metrics,
    create,
    growth,
    images_of,
    scrape,
    state_names,
    wait_for_replicas,
    wait_until_whole,
)
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import Service, post

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

JOBS, CALLS = 10, 4
STEPS = 60
# images begin together and end together: a replica may be met when all of its own are done, or
# when the only one that it has been given again has not begun
ATTEMPTS = 5


def scale(service: Service, count: int) -> None:
    """Change the number of replicas as an operator or an outside controller does."""
    reply = httpx.post(
        f"{service.dashboard_url}/api/v1/applications/shapes-sd/deployments/BaseModel/scale",
        json={"target_num_replicas": count},
        timeout=30,
    )
    assert reply.status_code == 200, reply.text


def scale_down_and_up(service: Service) -> None:
    scale(service, 1)
    wait_for_replicas(service, 1)
    time.sleep(1.0)
    scale(service, 2)
    wait_for_replicas(service)


def terminate_one(service: Service) -> None:
    """Send SIGTERM straight to a replica's process; another one follows it."""
    one = service.replicas()[0]
    one.terminate()
    one.wait(PATIENCE_S)
    wait_until_whole(service)


def roll(service: Service) -> None:
    """Deploy the pool's application again, as a new version of it; the front stays as it is."""
    config = yaml.safe_load((service.folder / "service.yaml").read_text())
    application = {
        "name": "shapes-sd",
        "import_path": "ray_cluster.deployments.app:build_app",
        "route_prefix": None,
        "external_scaler_enabled": True,
        "args": {"application": "shapes-sd", "config": config},
    }
    olds = {process.pid for process in service.replicas()}
    reply = httpx.put(
        f"{service.dashboard_url}/api/serve/applications/",
        json={"applications": [application]},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    deadline_s = time.monotonic() + PATIENCE_S
    while olds & {process.pid for process in service.replicas()}:
        assert time.monotonic() < deadline_s, "the old replicas are still there"
        time.sleep(0.2)


class Load:
    """Clients that each ask for their one image again and again: some by jobs, some attached.

    Attributes:
        num_made: images that came out, each as the first time.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._ending = threading.Event()
        self._first: dict[int, bytes] = {}
        self.num_made = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Have images made within the block, the first of each before it begins."""
        with ThreadPoolExecutor(JOBS + CALLS) as pool:
            clients = [pool.submit(self._ask, self._job, seed) for seed in range(JOBS)]
            seeds = range(JOBS, JOBS + CALLS)
            clients += [pool.submit(self._ask, self._call, seed) for seed in seeds]
            try:
                while len(self._first) < JOBS + CALLS and not any(one.done() for one in clients):
                    time.sleep(0.1)
                yield
            finally:
                self._ending.set()
                self.num_made = sum(one.result() for one in clients)

    def _ask(self, way: Callable[[int], bytes], seed: int) -> int:
        num_made = 0
        while not self._ending.is_set():
            image = way(seed)
            assert pixels_differ(image, self._first.setdefault(seed, image)) <= 1
            num_made += 1
        return num_made

    def _job(self, seed: int) -> bytes:
        job_id = create(self._service, seed, num_inference_steps=STEPS)
        return images_of(self._service, [job_id])[seed]

    def _call(self, seed: int) -> bytes:
        reply = post(self._service, seed=seed, num_inference_steps=STEPS, slo_s=600)
        assert reply.status_code == 200, reply.text
        return base64.b64decode(reply.json()["data"][0]["b64_json"])


def told_in_full(service: Service) -> Metrics:
    """Wait until all replicas are there and have told of all their steps."""
    wait_until_whole(service)
    wait_for_replicas(service)
    time.sleep(1.5)
    return scrape(service)


@pytest.mark.slow
@pytest.mark.parametrize("act", [terminate_one, scale_down_and_up, roll])
def test_images_outlive_a_replica_that_is_taken_away(
    service: Service, act: Callable[[Service], None]
) -> None:
    before, load = told_in_full(service), Load(service)
    resumed = before.total("resumed_images_total")
    # a replica killed right after the end of an image leaves its state to the sweep
    left = state_names(service)
    with load.running():
        started_s = time.monotonic()
        for _ in range(ATTEMPTS):
            act(service)
            if scrape(service).total("resumed_images_total") > resumed:
                break
        took_s = time.monotonic() - started_s
    after = told_in_full(service)

    assert growth(before, after, "images_total", event="completed") == load.num_made
    for event in ("error", "invalid", "aborted", "lost", "refused"):
        assert growth(before, after, "images_total", event=event) == 0
    repeated = growth(before, after, "step_batch_images_sum") - load.num_made * STEPS
    logger.warning(
        "%s took %.1f s: %d images made, %d leases handed back, %d images went on from a state, "
        "with %d steps in all; %d steps were repeated",
        *(act.__name__, took_s, load.num_made),
        growth(before, after, "images_total", event="requeued"),
        growth(before, after, "resumed_images_total"),
        growth(before, after, "resumed_steps_total"),
        repeated,
    )
    assert growth(before, after, "images_total", event="requeued") > 0
    assert growth(before, after, "resumed_images_total") > 0
    # what a drained replica had done is in the states, and what it had counted was told
    assert repeated == 0
    assert state_names(service) <= left
