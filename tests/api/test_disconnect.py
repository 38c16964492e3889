"""A client that goes away frees what it asked for, however the server tells."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlparse

import pytest
from fastapi import FastAPI

from tests.api.checks import URL
from tests.api.conftest import Serve
from tests.fakes import FakeDispatcherClient


def connect(url: str, body: bytes, length: int | None = None) -> socket.socket:
    address = urlparse(url)
    client = socket.create_connection((address.hostname, address.port), timeout=60)
    head = (
        f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    client.sendall(head.encode() + body)
    return client


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a condition."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.005)


def test_a_socket_that_closes_aborts_every_image_of_its_call(
    app: FastAPI, fake: FakeDispatcherClient, serve: Serve
) -> None:
    fake.outcome = lambda request: None
    client = connect(serve(app), json.dumps({"prompt": "a", "n": 3}).encode())
    until(lambda: fake.num_waits == 1)
    time.sleep(0.05)
    assert fake.aborted == []
    client.close()
    until(lambda: len(fake.aborted) == 3)
    assert fake.aborted == [request.request_id for request in fake.offered[0]]


def test_a_socket_that_closes_inside_the_body_offers_nothing(
    app: FastAPI, fake: FakeDispatcherClient, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(app)
    connect(url, b'{"prompt": "a', length=100).close()
    # one more call after it: the server lives
    client = connect(url, b'{"prompt": "a"}')
    assert client.recv(100).startswith(b"HTTP/1.1 200")
    client.close()
    assert len(fake.offered) == 1
    assert "unexpected" not in caplog.text


@pytest.mark.parametrize("num_cancels", [1, 3])
async def test_a_server_that_cancels_the_handler_aborts_as_well(
    app: FastAPI, fake: FakeDispatcherClient, monkeypatch: pytest.MonkeyPatch, num_cancels: int
) -> None:
    aborted: list[str] = []

    async def slow_abort(request_ids: tuple[str, ...]) -> None:
        await asyncio.sleep(0.05)
        aborted.extend(request_ids)

    monkeypatch.setattr(fake, "abort", slow_abort)
    messages = [{"type": "http.request", "body": b'{"prompt": "a", "n": 2}', "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        return await asyncio.Future()

    async def send(_: Any) -> None:
        raise AssertionError("nothing is left to answer")

    waiting = asyncio.Event()
    fake.outcome = lambda request: waiting.set()
    handler = asyncio.ensure_future(app(_scope(), receive, send))
    await waiting.wait()
    for _ in range(num_cancels):
        handler.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await handler
    await asyncio.sleep(0.1)
    assert aborted == [request.request_id for request in fake.offered[0]]


def _scope() -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": URL,
        "raw_path": URL.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "server": ("x", 80),
        "client": ("y", 1),
    }
