"""Bytes on a socket, as no HTTP client would send them."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterable
from contextlib import suppress

from tests.e2e.service import API_KEY, Service

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")


def connect(service: Service, timeout_s: float = 20.0) -> socket.socket:
    """Open a connection to the service's port."""
    host, port = service.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=timeout_s)


def head(
    method: str, path: str, headers: Iterable[tuple[str, str]] = (), *, length: int | None = None
) -> bytes:
    """Return the head of a request with the tests' API key."""
    rows = [("Host", "x"), ("Authorization", f"Bearer {API_KEY}"), *headers]
    if length is not None:
        rows.append(("Content-Length", str(length)))
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in rows)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")


def post(body: bytes, path: str = "/v1/images/generations", **headers: str) -> bytes:
    """Return a whole request with a JSON body; headers are named with ``_`` for ``-``."""
    named = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    rows = [(name, value) for name, value in named.items() if value]
    return head("POST", path, [*rows, ("Connection", "close")], length=len(body)) + body


def answers(
    service: Service, data: bytes, *, half_close: bool = False, timeout_s: float = 20.0
) -> list[int]:
    """Send bytes; return the statuses of what comes back until the other side closes or is silent.

    What the service does not take any more (it has answered, and closed) is not sent.
    """
    with connect(service, timeout_s) as connection:
        with suppress(ConnectionError):
            connection.sendall(data)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        return statuses(connection)


def trickle(service: Service, data: bytes, every_s: float) -> list[int]:
    """Send bytes one at a time; return the statuses of what comes back."""
    with connect(service) as connection:
        for index in range(len(data)):
            connection.sendall(data[index : index + 1])
            time.sleep(every_s)
        return statuses(connection)


def statuses(connection: socket.socket) -> list[int]:
    """Return the statuses of all replies until the other side closes or is silent."""
    received = b""
    with suppress(TimeoutError, ConnectionError):
        while piece := connection.recv(1 << 16):
            received += piece
    return [int(found) for found in _STATUS.findall(received)]
