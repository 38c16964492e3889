"""Bounds on what one connection may make a gateway keep: its request's head, its unread reply."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_cluster.api.errors import ApiError
from ray_cluster.api.settings import CurrentSettings

logger = logging.getLogger(__name__)

# ": " and the end of a line
_HEADER_EXTRA_BYTES = 4


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
