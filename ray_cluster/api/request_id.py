"""Gives every HTTP request an id that stands on the reply, in errors and in the log."""

from __future__ import annotations

import re
import secrets
from typing import Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_cluster.observability.logs import bound

HEADER = "X-Request-ID"
# whether the reply's header is written here or by a proxy in front (Ray Serve's writes it on
# every reply, with the id that it passes on: a second one would read as "id, id")
HeaderWriter = Literal["app", "proxy"]

_SANE = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class RequestIdMiddleware:
    """Takes a sane id from the request's own header, or draws one."""

    def __init__(self, app: ASGIApp, writer: HeaderWriter) -> None:
        self._app = app
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _SANE.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self._writer == "app":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        with bound(request_id=request_id):
            await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    """Return the id of a request that went through the middleware."""
    return str(request.state.request_id)
