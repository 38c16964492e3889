"""Each bound on what a call may take holds, and the documentation lists them all."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ray_cluster.config.loading import ClusterConfig
from tests.api.checks import URL, check_error, error_of
from tests.api.conftest import Serve, app_of, http_of
from tests.fakes import FakeDispatcherClient

JSON = {"content-type": "application/json"}


def app_with(fake: FakeDispatcherClient, config: ClusterConfig, **limits: Any) -> FastAPI:
    changed = config.limits.model_copy(update=limits)
    changes = {"limits": changed}
    return app_of(fake, config.model_copy(update=changes))


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return http_of(app)


async def test_a_large_head_is_a_431(fake: FakeDispatcherClient, config: ClusterConfig) -> None:
    async with client_of(app_with(fake, config, max_header_bytes=2000)) as http:
        assert (await http.get("/healthz", headers={"x": "y" * 1000})).status_code == 200
        for refused in (
            await http.get("/healthz", headers={"x": "y" * 2000}),
            await http.get("/healthz", headers=[("x", "y" * 100)] * 20),
            await http.get("/healthz", params={"x": "y" * 2000}),
            await http.get("/" + "y" * 2000),
        ):
            check_error(refused, 431, code="headers_too_large")
            assert "at most 2000" in error_of(refused)["message"]


async def test_a_body_that_does_not_arrive_in_time_is_a_408(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    async def dripping() -> AsyncIterator[bytes]:
        yield b'{"prompt": "a'
        for _ in range(100):
            # each part is in time; the whole is not
            await asyncio.sleep(0.05)
            yield b"a"
        yield b'"}'

    async with client_of(app_with(fake, config, max_body_s=0.3)) as http:
        reply = await http.post(URL, content=dripping(), headers=JSON)
    check_error(reply, 408, code="body_too_slow")
    assert "0.3 s allowed" in error_of(reply)["message"]
    assert fake.offered == []


def test_a_slow_body_on_a_socket_is_answered_and_its_connection_closed(
    fake: FakeDispatcherClient, config: ClusterConfig, serve: Serve
) -> None:
    host, port = serve(app_with(fake, config, max_body_s=0.3)).removeprefix("http://").split(":")
    head = f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"prompt"'.encode())
        reply = b""
        while part := connection.recv(65536):
            reply += part
    assert reply.startswith(b"HTTP/1.1 408")
    assert b"body_too_slow" in reply


async def test_a_reply_that_nobody_reads_ends(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    app = app_with(fake, config, max_send_stall_s=0.2)
    sent: list[str] = []
    body = [{"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}]

    async def send(message: Any) -> None:
        sent.append(message["type"])
        if message["type"] == "http.response.body":
            # as a server does whose buffers are full
            await asyncio.Event().wait()

    async def receive() -> Any:
        if not body:
            await asyncio.Event().wait()
        return body.pop()

    scope = {
        "type": "http",
        "method": "POST",
        "path": URL,
        "raw_path": URL.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("10.0.0.1", 1),
        "server": ("gateway", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    async with asyncio.timeout(10):
        await app(scope, receive, send)
    assert sent == ["http.response.start", "http.response.body"]


async def test_a_call_for_too_many_images_is_refused(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    async with client_of(app_with(fake, config, max_images_per_request=2)) as http:
        assert (await http.post(URL, json={"prompt": "a", "n": 2})).status_code == 200
        refused = await http.post(URL, json={"prompt": "a", "n": 3})
    check_error(refused, 400, param="n")
    assert "at most 2" in error_of(refused)["message"]


@pytest.mark.parametrize("name", ["prompt", "negative_prompt"])
async def test_a_long_prompt_is_refused(
    fake: FakeDispatcherClient, config: ClusterConfig, name: str
) -> None:
    async with client_of(app_with(fake, config, max_prompt_chars=10)) as http:
        body = {"prompt": "a", "guidance_scale": 2.0}
        assert (await http.post(URL, json=body | {name: "a" * 10})).status_code == 200
        refused = await http.post(URL, json=body | {name: "a" * 11})
    check_error(refused, 400, code="string_above_max_length", param=name)
