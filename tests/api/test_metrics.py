"""``/metrics`` on two gateways over one dispatcher: exact totals on either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.protocol.outcomes import Outcome
from ray_cluster.requests import ImageRequest
from tests.api.conftest import app_of, http_of, shapes_profile
from tests.fakes import FakeDispatcherClient, registration
from tests.jobs.jobs_cell import JobsCell, Replica

BODY = {"prompt": "a red circle", "seed": 7}


async def scrape(gateway: httpx.AsyncClient) -> dict[tuple[str, str], float]:
    reply = await gateway.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


@pytest.fixture
async def gateways(cell: JobsCell, config: ClusterConfig) -> AsyncIterator[list[httpx.AsyncClient]]:
    apps = [app_of(cell, config, results=cell.results) for _ in range(2)]
    clients = [http_of(app) for app in apps]
    yield clients
    for client in clients:
        await client.aclose()


async def test_totals_are_exact_and_never_fall(
    cell: JobsCell, gateways: list[httpx.AsyncClient]
) -> None:
    replica = Replica(cell, model="shapes")
    replica.epoch = await cell.dispatch.register(
        replace(registration("r", "shapes"), profile=shapes_profile())
    )
    working = asyncio.create_task(replica.work())
    route = "method=POST,route=/v1/images/generations,status=200"
    last: dict[tuple[str, str], float] = {}
    for index in range(10):
        calls = [gateways[i % 2].post("/v1/images/generations", json=BODY) for i in range(10)]
        replies = await asyncio.gather(*calls)
        assert {reply.status_code for reply in replies} == {200}
        await asyncio.sleep(0.15)
        found = await scrape(gateways[index % 2])
        total = 10 * (index + 1)
        assert found["ray_cluster_http_requests_total", route] == total
        assert found["ray_cluster_images_total", "event=completed"] == total
        assert found["ray_cluster_images_total", "event=accepted"] == total
        falling = [
            key for key in last if key[0].endswith(("_total", "_count")) and found[key] < last[key]
        ]
        assert falling == []
        last = found
    assert last["ray_cluster_waiting_images", "model=shapes"] == 0
    assert last["ray_cluster_leased_images", "model=shapes,replica=r"] == 0
    working.cancel()


async def test_ids_and_unknown_paths_make_no_series(gateways: list[httpx.AsyncClient]) -> None:
    for index in range(20):
        await gateways[0].get(f"/v1/jobs/job-{index}")
        await gateways[0].get(f"/nothing/{index}")
    await asyncio.sleep(0.15)
    found = await scrape(gateways[1])
    routes = {labels for name, labels in found if name == "ray_cluster_http_requests_total"}
    assert routes == {
        "method=GET,route=/v1/jobs/{job_id},status=404",
        "method=other,route=other,status=404",
    }


async def test_methods_that_http_does_not_know_make_one_series(
    http: httpx.AsyncClient,
) -> None:
    for index in range(20):
        await http.request(f"M{index}", "/v1/models")
    found = await scrape(http)
    counted = {labels for name, labels in found if name == "ray_cluster_http_requests_total"}
    assert counted == {"method=other,route=/v1/models,status=405"}


async def test_an_unexpected_failure_is_counted_as_one(
    fake: FakeDispatcherClient, http: httpx.AsyncClient
) -> None:
    def fail(_: ImageRequest) -> Outcome:
        raise RuntimeError("a bug")

    fake.outcome = fail
    assert (await http.post("/v1/images/generations", json=BODY)).status_code == 500
    route = "method=POST,route=/v1/images/generations,status=500"
    assert (await scrape(http))["ray_cluster_http_requests_total", route] == 1
