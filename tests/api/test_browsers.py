"""Web pages of configured origins may call everything and read every reply; others nothing."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.http import HttpConfig
from tests.api.checks import URL
from tests.fakes import FakeDispatcherClient

PAGE = "https://app.example.com"
KEY = {"Authorization": "Bearer key"}
FROM_PAGE = {**KEY, "Origin": PAGE}
RED = {"prompt": "a red circle"}


@pytest.fixture
def config(config: ClusterConfig) -> ClusterConfig:
    http = HttpConfig(api_keys=("key",), cors_origins=(PAGE, "http://localhost:3000"))
    return config.model_copy(update={"http": http})


def check_readable(reply: httpx.Response, origin: str = PAGE) -> None:
    assert reply.headers["access-control-allow-origin"] == origin
    exposed = reply.headers["access-control-expose-headers"].lower().split(", ")
    assert {"x-request-id", "retry-after", "location", "x-should-retry"} <= set(exposed)


@pytest.mark.parametrize("origin", [PAGE, "http://localhost:3000"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", URL), ("DELETE", "/v1/jobs/x"), ("GET", "/v1/files/x"), ("GET", "/nothing")],
)
async def test_a_preflight_needs_no_key(
    http: httpx.AsyncClient, method: str, path: str, origin: str
) -> None:
    asked = "authorization,content-type,idempotency-key,x-stainless-retry-count"
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": asked,
    }
    reply = await http.options(path, headers=headers)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert method in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == asked


async def test_every_reply_can_be_read(http: httpx.AsyncClient, fake: FakeDispatcherClient) -> None:
    def explode(_: Any) -> Any:
        raise ZeroDivisionError

    stored = {**RED, "response_format": "url"}
    statuses = {
        200: await http.post(URL, json=stored, headers=FROM_PAGE),
        400: await http.post(URL, json={}, headers=FROM_PAGE),
        401: await http.post(URL, json=RED, headers={"Origin": PAGE}),
        404: await http.get("/v1/files/img-none.png", headers=FROM_PAGE),
        405: await http.put(URL, headers=FROM_PAGE),
        415: await http.post(URL, content=b"x", headers=FROM_PAGE),
        431: await http.get("/healthz", headers={**FROM_PAGE, "X-Long": "x" * 40_000}),
    }
    fake.outcome = explode
    statuses[500] = await http.post(URL, json=RED, headers=FROM_PAGE)
    fake.down = True
    statuses[503] = await http.post(URL, json=RED, headers=FROM_PAGE)
    for status, reply in statuses.items():
        assert reply.status_code == status
        assert reply.headers["x-request-id"]
        check_readable(reply)


async def test_a_stream_can_be_read(http: httpx.AsyncClient) -> None:
    reply = await http.post(URL, json={**RED, "stream": True}, headers=FROM_PAGE)
    assert "image_generation.completed" in reply.text
    check_readable(reply)


async def test_other_pages_cannot_read(http: httpx.AsyncClient) -> None:
    other = {"Origin": "https://evil.example.com"}
    preflight = {**other, "Access-Control-Request-Method": "POST"}
    for reply in (
        await http.options(URL, headers=preflight),
        await http.post(URL, json=RED, headers=KEY | other),
    ):
        assert "access-control-allow-origin" not in reply.headers


async def test_a_cache_keeps_replies_to_pages_apart(http: httpx.AsyncClient) -> None:
    for headers in ({}, {"Origin": PAGE}):
        assert "Origin" in (await http.get("/v1/files/x", headers=headers)).headers["vary"]


class TestAllOrigins:
    @pytest.fixture
    def config(self, config: ClusterConfig) -> ClusterConfig:
        return config.model_copy(update={"http": HttpConfig(cors_origins=("*",))})

    async def test_any_page_can_read(self, http: httpx.AsyncClient) -> None:
        check_readable(await http.get("/v1/models", headers={"Origin": PAGE}), "*")


class TestWithoutOrigins:
    @pytest.fixture
    def config(self, config: ClusterConfig) -> ClusterConfig:
        return config.model_copy(update={"http": HttpConfig()})

    async def test_no_page_can_read(self, http: httpx.AsyncClient) -> None:
        headers = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        preflight = await http.options(URL, headers=headers)
        assert preflight.status_code == 405
        for reply in (preflight, await http.get("/v1/models", headers={"Origin": PAGE})):
            assert not [name for name in reply.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    ["", "app.example.com", f"{PAGE}/", f"{PAGE}/page", f"{PAGE}:443", "https://App.example.com"],
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="is no origin: browsers send scheme and host"):
        HttpConfig(cors_origins=(origin,))


def routes(app: FastAPI) -> list[tuple[str, str]]:
    paths = app.openapi()["paths"].items()
    return [(path, method) for path, operations in paths for method in operations]


async def test_head_answers_as_get_without_a_body(app: FastAPI, http: httpx.AsyncClient) -> None:
    known = {"{model}": "shapes", "{job_id}": "x", "{file_id}": "x", "{name}": "x", "{digest}": "x"}
    getting = [path for path, method in routes(app) if method == "get"]
    assert len(getting) == 15
    for pattern in getting:
        path = pattern
        for name, value in known.items():
            path = path.replace(name, value)
        got = None if path.endswith("/events") else await http.get(path, headers=KEY)
        head = await http.head(path, headers=KEY)
        assert head.content == b""
        if got is None:
            assert (head.status_code, head.headers["allow"]) == (405, "GET")
            continue
        assert head.status_code == got.status_code
        differing = {"x-request-id"} | ({"content-length"} if path == "/metrics" else set())
        for name in got.headers.keys() - differing:
            assert head.headers[name] == got.headers[name]
        without_key = await http.head(path)
        assert (without_key.status_code == 401) is (
            path.startswith("/v1/") and path != "/v1/files/x"
        )


async def test_a_wrong_method_is_told_every_right_one(
    app: FastAPI, http: httpx.AsyncClient
) -> None:
    allowed = {
        URL: "POST",
        "/v1/jobs": "GET, HEAD, POST",
        "/v1/jobs/x": "GET, HEAD, DELETE",
        "/v1/models": "GET, HEAD",
        "/v1/loras": "GET, HEAD, POST",
        "/v1/files": "POST",
        "/v1/preprocess": "POST",
        "/v1/controlnets": "GET, HEAD",
        "/v1/plan": "GET, HEAD",
        "/v1/plan/pause": "POST",
        "/v1/loras/x": "GET, HEAD, DELETE",
        "/healthz": "GET, HEAD",
        "/docs": "GET, HEAD",
    }
    for path, methods in allowed.items():
        reply = await http.patch(path, headers=KEY)
        assert (reply.status_code, reply.headers["allow"]) == (405, methods)
        assert f"use {methods}." in reply.json()["error"]["message"]
