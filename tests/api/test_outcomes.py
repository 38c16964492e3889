"""What becomes of a valid call: models that cannot serve, refused offers, failures, outages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.policies.types import Offer
from ray_cluster.requests import Failure, ImageRequest
from tests.api.checks import URL, error_of, refused
from tests.api.conftest import app_of, http_of, shapes_profile
from tests.fakes import FakeDispatcherClient, completed

RED = {"prompt": "a red circle"}


@pytest.mark.parametrize(("model", "status"), [("nothing", 404), ("late", 503)])
async def test_a_model_that_cannot_serve_says_why(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, model: str, status: int
) -> None:
    response = await http.post(URL, json={**RED, "model": model})
    assert response.status_code == status
    error = error_of(response)
    assert error["param"] == "model"
    assert error["code"] == ("model_not_found" if status == 404 else "model_not_ready")
    assert status != 404 or "shapes" in error["message"]
    assert fake.offered == []


async def test_a_model_that_registers_later_is_served_at_once(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    assert (await http.post(URL, json={**RED, "model": "late"})).status_code == 503
    fake.profiles["late"] = replace(shapes_profile(), model="late")
    response = await http.post(URL, json={**RED, "model": "late"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("offer", "status", "wait_s"),
    [
        (Offer(False, reason="queue_full", retry_after_s=7.2), 429, "8"),
        (Offer(False, reason="queue_full", retry_after_s=0.0), 429, "1"),
        (Offer(False, reason="too_late", retry_after_s=3.1), 429, "4"),
        (Offer(False, 1.25, reason="too_late", retry_after_s=float("inf")), 400, None),
        (Offer(False, reason="queue_full", retry_after_s=float("inf")), 429, "5"),
        (Offer(False, reason="held_back_full"), 429, "5"),
        (Offer(False, reason="model_not_ready", retry_after_s=0.0), 503, "5"),
        (Offer(False, reason="model_not_ready", retry_after_s=31.5), 503, "32"),
        (Offer(False, reason="stage_not_ready", lane="upscale:big"), 503, "5"),
        (Offer(False, reason="never_fits", retry_after_s=float("inf")), 400, None),
        (Offer(False, reason="unknown_model"), 404, None),
        (Offer(False, reason="closing"), 503, "5"),
    ],
)
async def test_a_refused_offer_says_when_to_come_back(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    offer: Offer,
    status: int,
    wait_s: str | None,
) -> None:
    fake.offers = [offer]
    response = await http.post(URL, json={**RED, "n": 2})
    assert response.status_code == status
    error_of(response)
    assert response.headers.get("retry-after") == wait_s
    assert fake.num_waits == 0
    assert fake.aborted == []


async def test_a_group_larger_than_the_queue_is_refused_naming_n(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    limits = config.limits.model_copy(update={"max_queued_images": 3})
    app = app_of(fake, config.model_copy(update={"limits": limits}))
    async with http_of(app) as http:
        assert "at most 3" in await refused(http, "n", **RED, n=4)


async def test_an_offer_that_was_sent_twice_is_waited_for(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.offers = [Offer(False, reason="duplicate_id")]
    response = await http.post(URL, json=RED)
    assert len(response.json()["data"]) == 1


@pytest.mark.parametrize(
    ("kind", "stage", "status", "retry"),
    [
        ("error", "denoise", 500, "false"),
        ("error", "upscale", 500, "false"),
        ("invalid", "encode", 400, "false"),
        ("lost", "replica", 503, "false"),
        ("lost", "queue", 503, "true"),
        ("aborted", "queue", 503, "true"),
    ],
)
async def test_one_failed_image_fails_the_call_and_ends_the_others(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    kind: Any,
    stage: Any,
    status: int,
    retry: str,
) -> None:
    def outcome(request: ImageRequest) -> Any:
        if request.seed != 1:
            return completed(request) if request.seed == 0 else None
        return Failure(request.request_id, kind, "prompt has 99 tokens", stage, "prompt")

    fake.outcome = outcome
    response = await http.post(URL, json={**RED, "n": 4, "seed": 0})
    assert response.status_code == status
    assert response.headers["x-should-retry"] == retry
    error = error_of(response)
    assert "prompt has 99 tokens" in error["message"]
    assert error["param"] == ("prompt" if kind == "invalid" else None)
    ids = [request.request_id for request in fake.offered[0]]
    assert kind == "invalid" or ids[1] in error["message"]
    assert fake.aborted == ids[2:]


async def test_an_abort_that_nobody_answers_delays_no_reply(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted = asyncio.Event()

    async def hang(_: object) -> None:
        aborted.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(fake, "abort", hang)
    fake.down = True
    # known from before
    fake.models = FakeDispatcherClient(*fake.profiles.values()).models  # type: ignore[method-assign]
    async with asyncio.timeout(60):
        response = await http.post(URL, json=RED)
    assert error_of(response)["code"] == "dispatcher_unavailable"
    await asyncio.sleep(0)
    assert aborted.is_set()


async def test_a_dispatcher_that_is_down_is_a_503(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.down = True
    response = await http.post(URL, json=RED)
    assert response.status_code == 503
    assert error_of(response)["code"] == "dispatcher_unavailable"
    assert response.headers["x-should-retry"] == "true"


async def test_a_job_store_that_is_away_is_a_503_of_its_own(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise JobStoreUnavailable("it is locked")

    async def warnings() -> list[str]:
        return ["the job store is away"]

    monkeypatch.setattr(fake, "create_job", fail)
    monkeypatch.setattr(fake, "warnings", warnings)
    response = await http.post("/v1/jobs", json=RED)
    assert response.status_code == 503
    assert error_of(response)["code"] == "job_store_unavailable"
    assert response.headers["x-should-retry"] == "true"
    # images that need no job are served
    assert (await http.post(URL, json=RED)).status_code == 200
    fake.profiles["late"] = replace(fake.profiles["shapes"], model="late")
    ready = await http.get("/readyz")
    assert (ready.status_code, ready.json()["warnings"]) == (200, ["the job store is away"])


async def test_a_dispatcher_that_dies_meanwhile_is_a_503(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    def die(_: ImageRequest) -> None:
        fake.down = True

    fake.outcome = die
    fake.max_wait_s = 0.0
    response = await http.post(URL, json=RED)
    assert response.status_code == 503
    error_of(response)


async def test_an_unexpected_exception_is_a_500_with_an_id(
    app: FastAPI, http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    def explode(_: ImageRequest) -> Any:
        raise ZeroDivisionError("secret detail")

    fake.outcome = explode
    response = await http.post(URL, json=RED)
    assert response.status_code == 500
    error = error_of(response)
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" not in error["message"]
    assert fake.aborted == [fake.offered[0][0].request_id]
