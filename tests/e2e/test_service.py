"""The running service through its public interface: HTTP, signals and the official client."""

from __future__ import annotations

import base64
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e import openai_scenario
from tests.e2e.jobs import PATIENCE_S, growth, scrape, wait_for_replicas
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import API_KEY, HEADERS, POISONED_WORD, Reached, Service, image_request

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]

OLDER_CLIENT = Path(sys.prefix) / "openai-1"


def post(service: Reached, **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{service.url}/v1/images/generations",
        json=image_request(**fields),
        headers=HEADERS,
        timeout=120,
    )


def images(reply: httpx.Response) -> list[bytes]:
    assert reply.status_code == 200, reply.text
    return [base64.b64decode(item["b64_json"]) for item in reply.json()["data"]]


@pytest.mark.parametrize("older", [False, True], ids=["current client", "older client"])
def test_the_official_client_works(service: Service, older: bool) -> None:
    environment = dict(os.environ)
    if older:
        assert OLDER_CLIENT.is_dir(), "the Makefile installs it: run `make venv`"
        environment["PYTHONPATH"] = str(OLDER_CLIENT)
    done = subprocess.run(
        [sys.executable, openai_scenario.__file__, service.url, API_KEY, POISONED_WORD],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    version = done.stdout.split()[-1]
    assert (version.split(".")[0] == "1") is older
    assert older or version == openai.__version__


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


def test_a_failing_request_does_not_touch_its_peers(service: Service) -> None:
    [alone] = images(post(service, seed=3))
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(
                lambda index: (
                    post(service, prompt=f"a {POISONED_WORD}")
                    if index % 2
                    else post(service, seed=3)
                ),
                range(8),
            )
        )
    assert [reply.status_code for reply in replies] == [200, 500] * 4
    for reply in replies[::2]:
        assert pixels_differ(images(reply)[0], alone) <= 1
    for reply in replies[1::2]:
        assert reply.json()["error"]["type"] == "server_error"
        assert reply.headers["x-should-retry"] == "false"


def test_two_flooded_gateways_refuse_with_a_time_to_come_back(service: Service) -> None:
    def one(index: int) -> httpx.Response:
        return post(service, n=8, num_inference_steps=30, seed=index)

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(one, range(12)))
    codes = [reply.status_code for reply in replies]
    assert set(codes) == {200, 429}
    for reply in replies:
        if reply.status_code == 429:
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"]
        else:
            assert len(images(reply)) == 8


def test_a_client_that_comes_back_when_told_is_served(service: Service) -> None:
    client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=API_KEY, max_retries=10)

    def one(index: int) -> int:
        reply = client.images.generate(
            prompt="a red circle", n=8, extra_body={"seed": index, "num_inference_steps": 8}
        )
        return len(reply.data or [])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(6))) == [8] * 6


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


def test_a_killed_replica_loses_no_request(service: Service) -> None:
    _kill_rounds(service, rounds=1, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_replicas_killed_at_twenty_random_steps_lose_no_request(service: Service) -> None:
    _kill_rounds(service, rounds=20, seed=1)


def test_every_process_stays_small(service: Service) -> None:
    for replica in service.replicas():
        assert replica.memory_full_info().pss < 1.2 * 2**30
    assert all(process.status() != psutil.STATUS_ZOMBIE for process in service.replicas())
