"""Durable jobs as a client drives them that outlives the service, and what the service tells."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ray_cluster.engine.step.state import RequestState
from ray_cluster.storage.blob_store import BlobStore
from tests.e2e.service import HEADERS, REPLICA_PROCESS, Reached, Service, image_request

PATIENCE_S = 240.0
VICTIMS = {
    "gateway": "ray::ServeReplica:front:Gateway",
    "dispatcher": "ray::ServeReplica:front:Dispatcher",
    "replica": REPLICA_PROCESS,
    "light": "ray::ServeReplica:shapes-sd-light:BaseModel",
    "discriminator": "ray::ServeReplica:shapes-judge:Discriminator",
    "ControlNet": "ray::ServeReplica:edges:ControlNet",
    "upscaler": "ray::ServeReplica:big:Upscaler",
    "controller": "ray::ServeReplica:controller:Controller",
}


def create(service: Reached, seed: int, **fields: Any) -> str:
    """Create a job; sent again with its key until it is answered, as a client must."""
    key = {"Idempotency-Key": f"{seed}-{random.random()}"}
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            reply = httpx.post(
                f"{service.url}/v1/jobs",
                json=image_request(**({"seed": seed, "slo_s": 600} | fields)),
                headers=HEADERS | key,
                timeout=10,
            )
            if reply.status_code in {200, 202}:
                return str(reply.json()["id"])
            assert reply.status_code in {429, 500, 503}, reply.text
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline_s
        time.sleep(0.3)


def look(service: Reached, path: str) -> httpx.Response | None:
    """Get something; None while the service is not there to ask."""
    try:
        reply = httpx.get(f"{service.url}{path}", headers=HEADERS, timeout=10)
    except httpx.HTTPError:
        return None
    assert reply.status_code != 404, f"{path} is lost: {reply.text}"
    return reply if reply.status_code == 200 else None


def ends_of(service: Reached, job_ids: Iterable[str]) -> list[dict[str, Any]]:
    """Wait until all jobs are completed; return them as the API tells of them."""
    ended = []
    deadline_s = time.monotonic() + PATIENCE_S
    for job_id in job_ids:
        while True:
            reply = look(service, f"/v1/jobs/{job_id}")
            job: dict[str, Any] = reply.json() if reply is not None else {"state": "unknown"}
            assert job["state"] not in {"failed", "cancelled"}, job
            if job["state"] == "completed":
                break
            assert time.monotonic() < deadline_s, job
            time.sleep(0.2)
        ended.append(job)
    return ended


def images_in(service: Reached, jobs: Iterable[dict[str, Any]]) -> dict[int, bytes]:
    """Return the images of completed jobs by seed."""
    found: dict[int, bytes] = {}
    deadline_s = time.monotonic() + PATIENCE_S
    for job in jobs:
        [image] = job["data"]
        while (reply := look(service, image["url"].removeprefix(service.url))) is None:
            assert time.monotonic() < deadline_s
        found[image["seed"]] = reply.content
    return found


def images_of(service: Reached, job_ids: Iterable[str]) -> dict[int, bytes]:
    """Wait until all jobs are completed; return their images by seed."""
    return images_in(service, ends_of(service, job_ids))


def wait_until_whole(service: Service, **others: int) -> None:
    """Wait for what was killed: the next round shall have it to kill again.

    Args:
        others: victims that not every service has, and how many of each.
    """
    deadline_s = time.monotonic() + PATIENCE_S
    wanted = {"gateway": 2, "dispatcher": 1, "replica": 2, "light": 1, "discriminator": 1} | others
    while any(len(service.processes(VICTIMS[name])) < count for name, count in wanted.items()):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    while look(service, "/readyz") is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)


def kill_one(service: Service, victim: str) -> Callable[[], None]:
    def kill() -> None:
        deadline_s = time.monotonic() + 10.0
        while not (found := service.processes(VICTIMS[victim], may_be_busy=True)):
            assert time.monotonic() < deadline_s, f"no {victim} is running"
        random.choice(found).kill()

    return kill


class Metrics:
    """One scrape of the whole cell.

    Attributes:
        samples: value by name and labels.
    """

    def __init__(self, text: str) -> None:
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def values(self, name: str, **labels: str) -> list[float]:
        """Return the values of that name that have at least these labels."""
        return [
            value
            for (found, has), value in self.samples.items()
            if found == f"ray_cluster_{name}" and has >= labels.items()
        ]

    def total(self, name: str, **labels: str) -> int:
        """Return their sum."""
        return round(sum(self.values(name, **labels)))


def growth(before: Metrics, after: Metrics, name: str, **labels: str) -> int:
    """Return by how much the samples of that name, with these labels, have grown together."""
    return after.total(name, **labels) - before.total(name, **labels)


def scrape(service: Reached) -> Metrics:
    """Scrape over a connection of its own, whichever gateway answers."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (reply := look(service, "/metrics")) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    return Metrics(reply.text)


def served_replicas(metrics: Metrics) -> int:
    """Return how many replicas of the model the dispatcher knows."""
    return len(metrics.values("free_places", model="shapes-sd"))


def wait_for_replicas(service: Reached, count: int = 2) -> Metrics:
    """Wait until the dispatcher knows just so many model replicas, and return what it tells."""
    deadline_s = time.monotonic() + PATIENCE_S
    while served_replicas(metrics := scrape(service)) != count:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    return metrics


def steps_now(service: Reached, job_ids: Collection[str]) -> dict[str, int]:
    """Return the steps done of each of the newest jobs, as they are told in one call."""
    reply = look(service, f"/v1/jobs?limit={len(job_ids)}")
    assert reply is not None
    steps = {job["id"]: int(job["step"]) for job in reply.json()["data"]}
    assert steps.keys() == set(job_ids)
    return steps


def state_names(service: Reached) -> set[str]:
    """Return the names of the states in the store."""
    store = BlobStore(str(service.folder / "store" / "states"))
    return {blob.name for blob in store.entries()}


def states_of(service: Reached) -> dict[int, int]:
    """Return the steps that the states in the store contain, by seed."""
    store = BlobStore(str(service.folder / "store" / "states"))
    found = {}
    for blob in store.entries():
        data = store.get(blob.name) if blob.name.endswith(".state") else None
        if data is not None:
            state = RequestState.from_bytes(data, device="cpu", arrival_s=0.0, deadline_s=0.0)
            found[state.request.seed] = state.step_index
    return found
