"""Brings a small body along with its request, from Ray Serve's proxy to the gateway.

By itself the proxy sends a request's head only, and the gateway calls back for the body: some
milliseconds of every call. :class:`EarlyBodySender` runs in the proxy and writes a body that is
already there into the request's scope; :class:`EarlyBodyReader` runs in the gateway and reads it
there. Either works without the other. No client can write into a scope's extensions.
"""

from __future__ import annotations

import asyncio

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ray_cluster.deployments.serve.proxy_headers import CommandFilter

_EXTENSION = "ray_cluster.early_body"
# a larger body costs more to send twice than the call for it
_MAX_BYTES = 64 * 1024
# head and body of a call often come in two packets; a client that is slower than this waits for
# the gateway, which has the limits on slow bodies
_WAIT_S = 0.02


def proxy_middlewares() -> list[Middleware]:
    """Return what Serve's proxy shall run (``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH``)."""
    return [Middleware(EarlyBodySender), Middleware(CommandFilter)]


class EarlyBodySender:
    """Writes a body that comes with its head into the scope; leaves ``receive`` as it was."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        if not _announces_small_body(scope):
            await self._app(scope, receive, send)
            return
        first: asyncio.Future[Message] = asyncio.ensure_future(receive())
        is_given = False

        async def receive_from_start() -> Message:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return await first

        try:
            await asyncio.wait({first}, timeout=_WAIT_S)
            if first.done() and _is_whole(first.result()):
                extensions = {**(scope.get("extensions") or {}), _EXTENSION: first.result()["body"]}
                scope = {**scope, "extensions": extensions}
            await self._app(scope, receive_from_start, send)
        finally:
            first.cancel()


class EarlyBodyReader:
    """Gives the application the body that the scope brought, without a call for it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        body = (scope.get("extensions") or {}).get(_EXTENSION)
        await self._app(scope, receive if body is None else _after(body, receive), send)


def _after(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that has ``body``, and after it whatever follows the body there."""
    is_given = False

    async def receive_after() -> Message:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}
        while (message := await receive())["type"] == "http.request":
            pass  # the same body again
        return message

    return receive_after


def _announces_small_body(scope: Scope) -> bool:
    if scope["type"] != "http":
        return False
    length: bytes = dict(scope["headers"]).get(b"content-length", b"")
    return length.isdigit() and len(length) < 9 and 0 < int(length) <= _MAX_BYTES


def _is_whole(message: Message) -> bool:
    return message["type"] == "http.request" and not message.get("more_body", False)
