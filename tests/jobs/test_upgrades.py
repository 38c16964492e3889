"""A service is upgraded under load, again and again: a later cell takes over from an earlier one.

In the order of KubeRay's `NewCluster`: the later one starts beside the earlier one, takes over once
its workers are there, and the earlier one gets SIGTERM a while after that.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.jobs import FINAL_STATES
from tests.e2e.jobs import Metrics
from tests.e2e.service import free_ports
from tests.jobs.conftest import PostgresServer

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

BODY = {"prompt": "a red circle", "num_inference_steps": 4, "size": "64x64"}
# as the official client: two more attempts, after what Retry-After says or half a second
NUM_RETRIES = 2
NUM_STEPS = 300


def wait_for(condition: Callable[[], Any], what: str, patience_s: float = 120.0) -> None:
    end_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end_s, f"waited in vain for {what}"
        time.sleep(0.1)


class Cells:
    """The processes of a service, and the Service of Kubernetes in front of them."""

    def __init__(self, folder: Path, store_url: str, **pool: Any) -> None:
        self._folder = folder
        self._numbers = count()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._path = folder / "config.yaml"
        places = {name: str(folder / name) for name in ("results", "states", "inputs")}
        present = {"name": "shapes-sd", "model": "shapes-sd-light", "max_px": 128, "min_px": 32}
        config = {
            "pools": [present | pool],
            "loras": {"num_stores": 0},
            "dispatch": {"service": "prod/images"},
            "http": {"open": True},
            "storage": {"jobs": store_url, **places},
        }
        self._path.write_text(yaml.safe_dump(config))

    def start(self) -> str:
        """Start one more; return its URL."""
        [port] = free_ports(1)
        name = f"cell-{next(self._numbers)}"
        command = [
            sys.executable,
            "-m",
            "tests.jobs.serving_cell",
            name,
            str(self._path),
            str(port),
        ]
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        url = f"http://127.0.0.1:{port}"
        self._processes[url] = process
        return url

    def endpoint(self) -> str | None:
        """Return one that is ready, as a Service chooses; None if none is."""
        return next((url for url in reversed(tuple(self._processes)) if self.is_up(url)), None)

    def is_down(self, url: str) -> bool:
        return not self.is_up(url)

    def is_up(self, url: str) -> bool:
        """Whether it passes its readiness probe."""
        try:
            return httpx.get(f"{url}/readyz", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, url: str) -> None:
        process = self._processes.pop(url)
        process.terminate()
        assert process.wait(60) == 0

    def kill_all(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


class Client:
    """Calls for ever, of one kind; counts what it has asked for, and what came of it."""

    def __init__(self, cells: Cells, kind: str, ends: threading.Event) -> None:
        self.cells, self.kind, self.ends = cells, kind, ends
        self.failed: list[str] = []
        self.waits_s: list[float] = []
        self.job_ids: list[str] = []
        self._calls = count()

    def run(self) -> None:
        while not self.ends.is_set():
            started_s = time.monotonic()
            number = next(self._calls)
            headers = {"Idempotency-Key": f"{self.kind}-{number}"} if self.kind != "plain" else {}
            path = "/v1/jobs" if self.kind == "job" else "/v1/images/generations"
            body = {**BODY, "n": 3} if self.kind == "job" else BODY
            reply = self._call(path, body, headers)
            self.waits_s.append(time.monotonic() - started_s)
            if self.kind == "job" and reply is not None:
                self.job_ids.append(reply.json()["id"])
                time.sleep(0.5)

    def _call(self, path: str, body: Any, headers: dict[str, str]) -> httpx.Response | None:
        said = ""
        for attempt in range(NUM_RETRIES + 1):
            url = self.cells.endpoint()
            waited_s = time.monotonic()
            while url is None and time.monotonic() - waited_s < 20:
                # a Service without endpoints refuses; its clients connect again
                time.sleep(0.1)
                url = self.cells.endpoint()
            if url is None:
                said = "no endpoint"
                continue
            try:
                reply = httpx.post(
                    f"{url}{path}", json=body, headers=headers, timeout=120, trust_env=False
                )
            except httpx.HTTPError as error:
                said = repr(error)
            else:
                if reply.status_code in {200, 202}:
                    return reply
                said = f"{reply.status_code} {reply.text[:200]}"
                if reply.status_code != 503:
                    break
                time.sleep(min(5.0, float(reply.headers.get("Retry-After", 0.5))))
            logger.info("%s, attempt %d: %s", self.kind, attempt, said)
        self.failed.append(said)
        return None


@contextmanager
def clients_of(cells: Cells) -> Iterator[list[Client]]:
    ends = threading.Event()
    clients = [Client(cells, kind, ends) for kind in ("plain", "plain", "keyed", "keyed", "job")]
    threads = [threading.Thread(target=one.run) for one in clients]
    for one in threads:
        one.start()
    try:
        yield clients
    finally:
        ends.set()
        for one in threads:
            one.join()


def test_upgrades_under_load_lose_nothing(tmp_path: Path, postgres: PostgresServer) -> None:
    upgrade(tmp_path, postgres.create("upgrades"), times=3, hold_s=5.0)


def upgrade(folder: Path, store_url: str, times: int, hold_s: float) -> None:
    """Upgrade a service under load, and see that nothing is lost, and nothing made twice.

    Args:
        hold_s: time between the later cell's readiness and the earlier one's SIGTERM.
    """
    cells = Cells(folder, store_url)
    took_s = []
    try:
        present = cells.start()
        wait_for(lambda: cells.is_up(present), "the first cell")
        with clients_of(cells) as clients:
            time.sleep(3)
            for _ in range(times):
                later = cells.start()
                wait_for(partial(cells.is_up, later), "a later cell")
                begun_s = time.monotonic()
                wait_for(partial(cells.is_down, present), "the earlier one's end")
                took_s.append(time.monotonic() - begun_s)
                time.sleep(hold_s)
                cells.stop(present)
                present = later
        failed = {one.kind: one.failed for one in clients if one.failed}
        waits = {one.kind: max(one.waits_s) for one in clients}
        num = Counter({one.kind: len(one.waits_s) for one in clients})
        logger.warning("%d hand-overs; calls %s; longest waits %s", times, dict(num), waits)
        assert not failed
        [jobs] = [one.job_ids for one in clients if one.kind == "job"]
        all_jobs_are_complete(present, jobs)
    finally:
        cells.kill_all()
    store = SqlJobStore.open(store_url)
    try:
        assert not store.unfinished()
    finally:
        store.close()


def test_an_image_that_is_half_made_goes_on_from_its_state(tmp_path: Path) -> None:
    store_url = f"sqlite:///{tmp_path}/jobs.db"
    cells = Cells(tmp_path, store_url, model="shapes-sd", max_num_inference_steps=NUM_STEPS)
    body = {**BODY, "num_inference_steps": NUM_STEPS, "size": "128x128", "seed": 7}
    try:
        earlier = cells.start()
        wait_for(lambda: cells.is_up(earlier), "the first cell")
        later, jobs = cells.start(), [posted(earlier, body)]

        def is_taken_over() -> bool:
            # one is always half made
            if is_up := cells.is_up(later):
                return is_up
            if job_of(earlier, jobs[-1])["state"] == "completed":
                jobs.append(posted(earlier, body))
            return False

        wait_for(is_taken_over, "the later cell")
        found = ended(later, jobs[-1])
        before, after = metrics_of(earlier), metrics_of(later)
        whole = ended(later, posted(later, body))
        assert image_of(later, found) == image_of(later, whole)
    finally:
        cells.kill_all()
    resumed, made = (after.total(f"{one}_steps_total") for one in ("resumed", "image"))
    made_before = before.total("image_steps_total") - (len(jobs) - 1) * NUM_STEPS
    logger.warning("%d steps made, %d in the state, %d made later", made_before, resumed, made)
    assert after.total("resumed_images_total") == 1
    assert resumed + made == NUM_STEPS
    # those since the last state are made again, and no others
    assert 0 <= made_before - resumed <= max(before.values("steps_between_exports")) + 10


def ended(url: str, job_id: str) -> dict[str, Any]:
    """Return a job once it is completed."""
    wait_for(lambda: job_of(url, job_id)["state"] in FINAL_STATES, job_id)
    found = job_of(url, job_id)
    assert found["state"] == "completed", found
    return found


def posted(url: str, body: dict[str, Any]) -> str:
    reply = httpx.post(f"{url}/v1/jobs", json=body, timeout=30, trust_env=False)
    assert reply.status_code == 202, reply.text
    return str(reply.json()["id"])


def job_of(url: str, job_id: str) -> dict[str, Any]:
    reply = httpx.get(f"{url}/v1/jobs/{job_id}", timeout=30, trust_env=False)
    found: dict[str, Any] = reply.json()
    return found


def image_of(url: str, found: dict[str, Any]) -> bytes:
    path = httpx.URL(found["data"][0]["url"]).path
    return httpx.get(f"{url}{path}", timeout=30, trust_env=False).content


def metrics_of(url: str) -> Metrics:
    return Metrics(httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text)


def all_jobs_are_complete(url: str, job_ids: list[str]) -> None:
    """Each job is completed with three images of its own, and each of these is there."""
    assert job_ids
    seen = set()
    for job_id in job_ids:
        found = ended(url, job_id)
        urls = [one["url"] for one in found["data"]]
        assert len(urls) == 3
        seen.update(urls)
        for one in urls:
            path = httpx.URL(one).path
            assert httpx.get(f"{url}{path}", timeout=30, trust_env=False).status_code == 200
    assert len(seen) == 3 * len(job_ids)
