"""Durable jobs against kill -9 of each process, and of all of them at once."""

from __future__ import annotations

import base64
import logging
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.jobs import create, images_of, kill_one, wait_until_whole
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import HEADERS, Service, image_request

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

JOBS, CALLS = 6, 4


@pytest.fixture(scope="module")
def unkilled(service: Service) -> dict[int, bytes]:
    """The images of a run in which nothing dies, by seed."""
    return images_of(service, [create(service, seed) for seed in range(JOBS)])


def kill_and_check(
    service: Service, unkilled: dict[int, bytes], kill: Callable[[], None], delay_s: float
) -> float:
    """Have jobs made, kill in between; return the seconds from the kill to the last image."""
    job_ids = [create(service, seed) for seed in range(JOBS)]
    time.sleep(delay_s)
    started_s = time.monotonic()
    kill()
    found = images_of(service, job_ids)
    took_s = time.monotonic() - started_s
    assert found.keys() == unkilled.keys()
    assert max(pixels_differ(found[seed], unkilled[seed]) for seed in found) <= 1
    return took_s


def kill_everything(service: Service) -> None:
    service.kill_all()
    service.start()


def rounds(service: Service, unkilled: dict[int, bytes], what: str, count: int) -> None:
    rng = random.Random(7)
    kill = (lambda: kill_everything(service)) if what == "all" else kill_one(service, what)
    took_s = []
    for _ in range(count):
        took_s.append(kill_and_check(service, unkilled, kill, rng.uniform(0.0, 2.0)))
        wait_until_whole(service)
    logger.warning(
        "%s: %d kills, from kill to the last of %d images: median %.1f s, worst %.1f s",
        *(what, count, JOBS, statistics.median(took_s), max(took_s)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dispatcher", "gateway"])
def test_jobs_outlive_a_killed_process_and_attached_calls_end(
    service: Service, unkilled: dict[int, bytes], what: str
) -> None:
    """Each call is completed, or fails clearly; none hangs."""

    def call(seed: int) -> tuple[int, dict[str, Any]]:
        reply = httpx.post(
            f"{service.url}/v1/images/generations",
            json=image_request(seed=seed),
            headers=HEADERS,
            timeout=60,
        )
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return reply.status_code, reply.json() if is_json else {}

    with ThreadPoolExecutor(CALLS) as pool:
        calls = [pool.submit(call, seed) for seed in range(CALLS)]
        kill_and_check(service, unkilled, kill_one(service, what), delay_s=0.3)
        ends = [one.result() for one in calls]
    for seed, (status, body) in enumerate(ends):
        if status == 200:
            data = base64.b64decode(body["data"][0]["b64_json"])
            assert pixels_differ(data, unkilled[seed]) <= 1
        else:
            # the proxy itself answers for a dead gateway
            assert status in ({500, 503} if what == "gateway" else {503}), body
    wait_until_whole(service)


@pytest.mark.slow
def test_jobs_outlive_everything(service: Service, unkilled: dict[int, bytes]) -> None:
    before = create(service, JOBS)
    images = images_of(service, [before])
    rounds(service, unkilled, "all", 1)
    # what was finished before is still there
    assert images_of(service, [before]) == images
    assert not list((service.folder / "store" / "results").glob("*.part"))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("what", ["gateway", "dispatcher", "replica", "all"])
def test_jobs_outlive_twenty_kills(service: Service, unkilled: dict[int, bytes], what: str) -> None:
    rounds(service, unkilled, what, 20)
