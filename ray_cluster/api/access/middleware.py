"""What every call passes through: CORS, a request id, bounds on its head and unread reply."""

from __future__ import annotations

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from http import HTTPStatus
from typing import Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_cluster.api.errors import ApiError
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.sections.http import HttpConfig
from ray_cluster.observability.logs import REQUEST_ID, bound

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-ID"
# whether the reply's header is written here or by a proxy in front (Ray Serve's writes it on
# every reply, with the id that it passes on: a second one would read as "id, id")
HeaderWriter = Literal["app", "proxy"]

# ": " and the end of a line
_HEADER_EXTRA_BYTES = 4

_METHODS = ("GET", "HEAD", "POST", "DELETE")
# what a page may read of a reply beside its body and type
_EXPOSED = (REQUEST_ID_HEADER, "Retry-After", "x-should-retry", "Location", "ETag", "Allow")


class HttpMiddleware(ABC):
    """What HTTP calls pass through, and other connections pass by."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        serve = self.serve if scope["type"] == "http" else self._app
        await serve(scope, receive, send)

    @abstractmethod
    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP call."""


class RequestIdMiddleware(HttpMiddleware):
    """Takes a sane id from the request's own header, or draws one, for reply, errors and log."""

    def __init__(self, app: ASGIApp, writer: HeaderWriter) -> None:
        super().__init__(app)
        self._writer = writer

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP call."""
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


class LimitsMiddleware(HttpMiddleware):
    """Refuses large heads with 431, and ends a reply that its client does not read."""

    def __init__(self, app: ASGIApp, settings: CurrentSettings) -> None:
        super().__init__(app)
        self._settings = settings

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP call."""
        limits = self._settings.latest.limits
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


class BrowserMiddleware:
    """Starlette's CORS middleware with the present settings.

    Preflights are answered here, without a key; every other reply, errors too, gets the headers.
    """

    def __init__(self, app: ASGIApp, settings: CurrentSettings) -> None:
        self._app = app
        self._settings = settings
        self._built_for = HttpConfig()
        self._with_headers: ASGIApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if self._settings.latest.http is not self._built_for:
            self._built_for = self._settings.latest.http
            self._with_headers = self._built()
        await self._with_headers(scope, receive, send)

    def _built(self) -> ASGIApp:
        origins = self._built_for.cors_origins
        if not origins:
            return self._app
        return CORSMiddleware(
            self._app,
            allow_origins=origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
        )
