"""The running service through its public interface: HTTP, signals and the official client."""

from __future__ import annotations

import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from tests.e2e.jobs import PATIENCE_S, growth, scrape, wait_for_replicas
from tests.e2e.openai_clients import client_that_works
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import API_KEY, HEADERS, Service, image_request, images, post

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def test_the_official_client_works(service: Service) -> None:
    assert client_that_works(service) == openai.__version__


def test_proxies_and_pages_are_known_through_rays_own_proxy(service: Service) -> None:
    """Uvicorn in Serve's proxy leaves peer and scheme to the gateway, which trusts this machine."""
    forwarded = {
        "X-Forwarded-For": "203.0.113.7",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": "images.example.com",
        "X-Forwarded-Prefix": "/cell",
        "Origin": "http://localhost:3000",
    }
    body = image_request(num_inference_steps=2)
    reply = httpx.post(f"{service.url}/v1/jobs", json=body, headers=HEADERS | forwarded)
    job_id = reply.json()["id"]
    assert reply.headers["location"] == f"https://images.example.com/cell/v1/jobs/{job_id}"
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
    preflight = {"Origin": "http://localhost:3000", "Access-Control-Request-Method": "POST"}
    reply = httpx.options(f"{service.url}/v1/jobs", headers=preflight)
    assert reply.status_code == 200
    for path in ("/healthz", "/metrics", "/v1/models", f"/v1/jobs/{job_id}"):
        reply = httpx.head(service.url + path, headers=HEADERS)
        assert (reply.status_code, reply.content) == (200, b"")
        assert int(reply.headers["content-length"]) > 0


def test_a_client_that_goes_away_frees_its_rows(service: Service) -> None:
    body = '{"prompt": "a red circle", "n": 8, "num_inference_steps": 100, "size": "128x128"}'
    request = (
        f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    host, port = service.url.removeprefix("http://").split(":")
    before = wait_for_replicas(service)
    for _ in range(2):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request.encode())
            time.sleep(1.0)
    deadline_s = time.monotonic() + PATIENCE_S
    while growth(before, after := scrape(service), "images_total", event="aborted") < 16:
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    # nobody waited for the 1,600 steps that these images would have taken
    assert growth(before, after, "images_total", event="completed") == 0
    assert post(service, num_inference_steps=2).status_code == 200


def _kill_rounds(service: Service, rounds: int, seed: int) -> None:
    """Kill a replica at a random moment, ``rounds`` times, under 12 requests in flight."""
    rng = random.Random(seed)
    steps = 40
    with ThreadPoolExecutor(12) as pool:

        def run() -> list[httpx.Response]:
            jobs = [
                pool.submit(post, service, seed=index, num_inference_steps=steps, n=1)
                for index in range(12)
            ]
            return [job.result() for job in jobs]

        whole = [images(reply)[0] for reply in run()]
        for _ in range(rounds):
            _wait_for_replicas(service)
            running = pool.submit(run_after_kill, service, rng.uniform(0.2, 2.0))
            replies = run()
            assert running.result(), "the replica died before any request was in flight"
            for reply, expected in zip(replies, whole, strict=True):
                assert pixels_differ(images(reply)[0], expected) <= 1


def run_after_kill(service: Service, delay_s: float) -> bool:
    time.sleep(delay_s)
    victims = service.replicas()
    if victims:
        random.choice(victims).kill()
    return bool(victims)


def _wait_for_replicas(service: Service, count: int = 2) -> None:
    deadline_s = time.monotonic() + 90
    while len(service.replicas()) < count:
        assert time.monotonic() < deadline_s, "Serve did not bring the replica back"
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_replicas_killed_at_twenty_random_steps_lose_no_request(service: Service) -> None:
    _kill_rounds(service, rounds=20, seed=1)


def test_every_process_stays_small(service: Service) -> None:
    for replica in service.replicas():
        assert replica.memory_full_info().pss < 1.2 * 2**30
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in service.replicas())
