"""Jobs and calls of the running service that are cancelled at random moments."""

from __future__ import annotations

import json
import logging
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.e2e.jobs import Metrics, create, scrape, states_of, wait_for_replicas
from tests.e2e.service import API_KEY, HEADERS, Service, image_request, running

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]

CANCELS, JOBS, CALLS = 100, 12, 8
MAX_STEPS = 120
# age of what is told of steps
PROGRESS_S = 0.02
# after which everything that was done has been told
TOLD_S = 1.5


@pytest.fixture(scope="module")
def cancelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("cancelled")
    with running(folder, dispatch={"progress_s": PROGRESS_S}) as one:
        yield one


def cancel_job(service: Service, seed: int, num_steps: int, delay_s: float) -> bool:
    """Create a job and delete it a while later; returns whether that was before its end."""
    job_id = create(service, seed, num_inference_steps=num_steps)
    time.sleep(delay_s)
    reply = httpx.delete(f"{service.url}/v1/jobs/{job_id}", headers=HEADERS, timeout=10)
    assert reply.status_code == 200, reply.text
    state = reply.json()["state"]
    assert state in {"cancelled", "completed"}
    return bool(state == "cancelled")


def leave(service: Service, seed: int, num_steps: int, delay_s: float) -> bool:
    """Ask for an image, and go away a while later; returns whether that was before its end."""
    body = json.dumps(image_request(seed=seed, num_inference_steps=num_steps))
    request = (
        f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(request.encode())
        connection.settimeout(delay_s)
        try:
            connection.recv(1)
        except TimeoutError:
            return True
    return False


def in_peace(service: Service) -> tuple[Metrics, float]:
    """Wait until nothing is in flight; return what is told, and the replicas' memory in MiB."""
    metrics = wait_for_replicas(service)
    while metrics.total("leased_images") or metrics.total("waiting_images"):
        metrics = scrape(service)
    time.sleep(TOLD_S)
    memory = [psutil.Process(one.pid).memory_full_info().pss for one in service.replicas()]
    return scrape(service), sum(memory) / 2**20


def wave(service: Service, chance: random.Random) -> tuple[int, int]:
    """Cancel many at once; return how many were, and the image steps told of after the last."""
    with ThreadPoolExecutor(JOBS + CALLS) as pool:
        ways = [cancel_job] * JOBS + [leave] * CALLS
        moments = [(chance.randint(2, MAX_STEPS), chance.uniform(0.02, 4.0)) for _ in ways]
        clients = [pool.submit(way, service, seed, *moments[seed]) for seed, way in enumerate(ways)]
        num_cancelled = sum(client.result() for client in clients)
    at_once = scrape(service).total("step_batch_images_sum")
    metrics, _ = in_peace(service)
    steps = metrics.total("step_batch_images_sum")
    time.sleep(TOLD_S)
    # nothing is made any more
    assert scrape(service).total("step_batch_images_sum") == steps
    assert metrics.total("free_places", model="shapes-sd") == 16
    assert metrics.total("open_jobs") == 0
    assert states_of(service) == {}
    return num_cancelled, steps - at_once


def test_many_cancels_at_random_moments_leave_nothing(cancelled: Service) -> None:
    chance, num_cancelled, late = random.Random(9), 0, []
    wave(cancelled, chance)
    before, before_mib = in_peace(cancelled)
    # the faster the machine, the more images are done before they are cancelled
    while num_cancelled < CANCELS:
        count, num_late = wave(cancelled, chance)
        num_cancelled += count
        late.append(num_late)
    after, after_mib = in_peace(cancelled)
    aborted = after.total("images_total", event="aborted")
    logger.warning(
        "%d cancels, %d of them of images that were accepted; image steps told of after the last "
        "answer of a wave: worst %d; replicas' memory %.0f MiB before, %.0f MiB after",
        *(num_cancelled, aborted - before.total("images_total", event="aborted")),
        *(max(late), before_mib, after_mib),
    )
    assert after_mib < before_mib + 64
    files = [one.name for one in (cancelled.folder / "store" / "results").iterdir()]
    assert not [name for name in files if name.endswith(".part")]
    # what is there are the images of the jobs that were done before
    time.sleep(6.0)
    listed = httpx.get(f"{cancelled.url}/v1/jobs?limit=100", headers=HEADERS, timeout=10).json()
    assert {job["state"] for job in listed["data"]} <= {"cancelled", "completed"}


def test_a_cancelled_job_stops_within_steps(cancelled: Service) -> None:
    """Alone, so that every step that is counted is its own."""
    chance, after_answer = random.Random(10), []
    for index in range(20):
        before, _ = in_peace(cancelled)
        job_id = create(cancelled, index, num_inference_steps=400, n=8)
        time.sleep(chance.uniform(0.5, 2.5))
        reply = httpx.delete(f"{cancelled.url}/v1/jobs/{job_id}", headers=HEADERS, timeout=10)
        at_once = scrape(cancelled).total("step_batch_images_sum")
        assert reply.json()["state"] == "cancelled"
        after, _ = in_peace(cancelled)
        total = after.total("step_batch_images_sum")
        assert total > before.total("step_batch_images_sum")
        after_answer.append((total - at_once) / 8)
    logger.warning(
        "20 jobs of 8 images: steps told of after the answer: worst %.2f, mean %.2f",
        *(max(after_answer), sum(after_answer) / len(after_answer)),
    )
    # the step under way at the answer, and those that were not told yet when it was scraped
    assert max(after_answer) <= 2.0
