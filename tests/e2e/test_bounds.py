"""What is bounded at the running service's socket, which is Ray Serve's."""

from __future__ import annotations

import socket
import time

import pytest

from tests.e2e.service import API_KEY, Service

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


def connect(service: Service) -> socket.socket:
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def test_a_large_head_is_a_431(service: Service) -> None:
    with connect(service) as connection:
        head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Much: " + b"x" * 40_000
        connection.sendall(head + b"\r\n\r\n")
        reply = connection.recv(65536)
    assert reply.startswith(b"HTTP/1.1 431")


def test_a_body_that_does_not_arrive_is_a_408_and_an_idle_connection_is_closed(
    service: Service,
) -> None:
    """Both are waited for at once."""
    head = (
        f"POST /v1/images/generations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\n"
        "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    )
    with connect(service) as unfinished, connect(service) as connection:
        unfinished.sendall(head.encode() + b'{"prompt"')
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        answered_s = time.monotonic()
        while connection.recv(65536):
            pass
        # not at once: only after `keep_alive_s`
        assert time.monotonic() - answered_s > 2
        assert unfinished.recv(65536).startswith(b"HTTP/1.1 408")
