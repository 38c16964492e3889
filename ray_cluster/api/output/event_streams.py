"""Replies that are streams of server-sent events (SSE)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress

from fastapi.sse import EventSourceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from ray_cluster.api.output.attached_images import while_connected

KEEP_ALIVE = b": still there\n\n"


class EventStream(EventSourceResponse):
    """Streams events until they end or the client leaves.

    Args:
        events: begun already, so that its ``finally`` runs: closed at the end, however that comes.
        opening: sent at once, so that clients learn that the stream is open.
    """

    def __init__(self, events: AsyncGenerator[bytes], opening: bytes = KEEP_ALIVE) -> None:
        super().__init__(
            _opened(opening, events),
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        # it would watch for the client's leaving, too, but not with every server
        streaming = super().__call__(scope, _silence, send)
        async with aclosing(self._events):
            with suppress(ClientDisconnect):
                await while_connected(Request(scope, receive), streaming)


async def _opened(opening: bytes, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    yield opening
    async for event in events:
        yield event


async def _silence() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
