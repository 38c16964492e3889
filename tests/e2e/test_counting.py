"""``/metrics`` of the running service: exact, on whichever gateway, whatever ends meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest

from tests.e2e.jobs import Metrics, growth, scrape, wait_for_replicas
from tests.e2e.service import Service, post

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

REQUESTS = 40
SCRAPES = 10
STEPS = 4
CLIENTS = 8
ROUTE = "/v1/images/generations"
# what only grows
COUNTED = ("_total", "_count", "_sum", "_bucket")


def wait_for_peace(service: Service) -> Metrics:
    """Wait until nothing is in flight, and has been told: two scrapes tell of the same steps."""
    metrics = wait_for_replicas(service)
    while True:
        time.sleep(1.5)
        metrics, before = scrape(service), metrics
        names = ("step_batch_images_sum", "images_total", "leased_images")
        if all(metrics.total(name) == before.total(name) for name in names):
            return metrics


def send(service: Service, while_they_run: Callable[[], None]) -> None:
    """Send all requests, a connection each, and scrape and act while they are answered."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        calls = [
            pool.submit(post, service, seed=index, num_inference_steps=STEPS)
            for index in range(REQUESTS)
        ]
        while_they_run()
        assert {call.result().status_code for call in calls} == {200}


def assert_nothing_fell(scrapes: list[Metrics]) -> None:
    for earlier, later in pairwise(scrapes):
        fallen = {
            key: (value, later.samples.get(key))
            for key, value in earlier.samples.items()
            if key[0].endswith(COUNTED) and later.samples.get(key, -1.0) < value
        }
        assert not fallen


def check_totals(before: Metrics, after: Metrics) -> None:
    """Every request is counted once by its gateway, and its image once by the dispatcher."""
    calls = growth(before, after, "http_requests_total", route=ROUTE, status="200")
    assert calls == growth(before, after, "http_requests_total", route=ROUTE) == REQUESTS
    assert growth(before, after, "http_request_seconds_count", route=ROUTE) == REQUESTS
    assert growth(before, after, "images_total", event="accepted") == REQUESTS
    assert growth(before, after, "images_total", event="completed") == REQUESTS
    for event in ("refused", "error", "invalid", "aborted", "lost"):
        assert growth(before, after, "images_total", event=event) == 0


@pytest.mark.slow
def test_ten_scrapes_of_many_requests_are_exact(service: Service) -> None:
    scrapes = [wait_for_peace(service)]

    def look_on() -> None:
        for _ in range(SCRAPES // 2):
            scrapes.append(scrape(service))
            time.sleep(0.5)

    send(service, look_on)
    wait_for_peace(service)
    # by now every scrape tells the same, whichever gateway answers it
    for _ in range(SCRAPES - SCRAPES // 2):
        scrapes.append(scrape(service))
        check_totals(scrapes[0], scrapes[-1])
        assert growth(scrapes[0], scrapes[-1], "step_batch_images_sum") == REQUESTS * STEPS
        assert growth(scrapes[0], scrapes[-1], "images_total", event="requeued") == 0
    assert_nothing_fell(scrapes)


@pytest.mark.slow
def test_nothing_falls_when_a_replica_is_killed(service: Service) -> None:
    scrapes = [wait_for_peace(service)]

    def kill_in_the_middle() -> None:
        while growth(scrapes[0], scrapes[-1], "images_total", event="completed") < REQUESTS // 3:
            scrapes.append(scrape(service))
            time.sleep(0.1)
        service.replicas()[0].kill()
        for _ in range(SCRAPES):
            scrapes.append(scrape(service))
            time.sleep(0.5)

    send(service, kill_in_the_middle)
    scrapes.append(wait_for_peace(service))
    check_totals(scrapes[0], scrapes[-1])
    assert_nothing_fell(scrapes)
