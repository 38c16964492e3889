"""What every call passes through: a request id, bounds on its head and its unread reply."""

from __future__ import annotations

import asyncio
import logging
import secrets
from http import HTTPStatus
from typing import Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_cluster.api.errors import ApiError
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.observability.logs import REQUEST_ID, bound

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-ID"
# whether the reply's header is written here or by a proxy in front (Ray Serve's writes it on
# every reply, with the id that it passes on: a second one would read as "id, id")
HeaderWriter = Literal["app", "proxy"]

# ": " and the end of a line
_HEADER_EXTRA_BYTES = 4


class RequestIdMiddleware:
    """Takes a sane id from the request's own header, or draws one, for reply, errors and log."""

    def __init__(self, app: ASGIApp, writer: HeaderWriter) -> None:
        self._app = app
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and self._writer == "app":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        with bound(request_id=request_id):
            await self._app(scope, receive, send_with_id)


def request_id_of(request: Request) -> str:
    """Return the id of a request that went through the middleware."""
    return str(request.state.request_id)


class LimitsMiddleware:
    """Refuses large heads with 431, and ends a reply that its client does not read."""

    def __init__(self, app: ASGIApp, settings: CurrentSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limits = self._settings.limits
        num_bytes = _head_bytes(scope)
        if num_bytes > limits.max_header_bytes:
            await _too_large(num_bytes, limits.max_header_bytes).response()(scope, receive, send)
            return
        is_stalled = False

        async def bounded_send(message: Message) -> None:
            nonlocal is_stalled
            try:
                async with asyncio.timeout(limits.max_send_stall_s):
                    await send(message)
            except TimeoutError:
                is_stalled = True
                raise

        try:
            await self._app(scope, receive, bounded_send)
        # what becomes of the timeout in a response that has begun
        except (OSError, RuntimeError, ClientDisconnect):
            if not is_stalled:
                raise
            stalled_s = limits.max_send_stall_s
            logger.warning("a reply ends: its client has read nothing for %g s", stalled_s)


def _head_bytes(scope: Scope) -> int:
    head = len(scope.get("raw_path") or scope["path"]) + len(scope.get("query_string", b""))
    return head + sum(
        len(name) + len(value) + _HEADER_EXTRA_BYTES for name, value in scope["headers"]
    )


def _too_large(num_bytes: int, max_bytes: int) -> ApiError:
    return ApiError(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        f"The path and the headers have {num_bytes} bytes; at most {max_bytes} are allowed "
        "(limits.max_header_bytes). Send fewer or shorter ones.",
        code="headers_too_large",
    )
