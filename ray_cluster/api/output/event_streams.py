"""Replies that are streams of server-sent events (SSE): of an image, and of a job.

An event's id is the version of the job that it shows. So nobody stores a list of events: whoever
comes back says which version they have seen, and what differs is news.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from http import HTTPStatus
from typing import Any

from fastapi.sse import EventSourceResponse
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from ray_cluster.api.attached_images import while_connected
from ray_cluster.api.call_reader import EventKind
from ray_cluster.api.errors import ApiError
from ray_cluster.api.output.error_answers import from_unavailable
from ray_cluster.api.output.reply_writer import (
    RepliedImage,
    append_base64,
    deadline_of,
    details_of,
    quality_of,
    size_text,
)
from ray_cluster.errors import Unavailable
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.protocol.jobs import JobView
from ray_cluster.protocol.outcomes import Preview
from ray_cluster.requests import ImageRequest

KEEP_ALIVE = b": still there\n\n"

logger = logging.getLogger(__name__)

Updates = AsyncGenerator[Preview | RepliedImage | None]
"""The previews of one image, at last the image; None says that it is still being made."""

# OpenAI's clients want the field; nothing is counted in tokens here
_NO_USAGE = {
    "input_tokens": 0,
    "output_tokens": 0,
    "total_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
}

# "queued" and the final states by their own names; a running job's events by what is new
EVENT_NAMES = ("queued", "started", "progress", "preview", "completed", "failed", "cancelled")
OPENING = b"retry: 1000\n\n"
# longest silence; proxies close connections that are silent for long
_KEEP_ALIVE_S = 10.0
# a stream ends after so long without an answer
_PATIENCE_S = 60.0
_RETRY_S = 0.5
# of a number of previews; Python refuses to read numbers of thousands
_MANY_DIGITS = 10


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


async def image_events(
    request: ImageRequest, kind: EventKind, updates: Updates, clock: Callable[[], float]
) -> AsyncGenerator[bytes]:
    """Yield the events of an image, first nothing once it is admitted; errors end them.

    Args:
        kind: what they are called.
        clock: Unix time in seconds.

    Raises:
        ApiError, Unavailable: before it is admitted.
    """
    async with aclosing(updates):
        await anext(updates)
        yield b""
        try:
            async for update in updates:
                yield await _event(request, kind, update, int(clock()))
        except ApiError as error:
            yield _failure(error)
        except Unavailable as error:
            logger.warning("the stream of %s ends: %s", request.request_id, error)
            yield _failure(from_unavailable(error))


async def _event(
    request: ImageRequest,
    kind: EventKind,
    update: Preview | RepliedImage | None,
    created_s: int,
) -> bytes:
    if update is None:
        return KEEP_ALIVE
    if isinstance(update, Preview):
        name = f"{kind}.partial_image"
        more: dict[str, Any] = {
            # of what is not enlarged yet
            "size": "{}x{}".format(*request.canvas_px),
            "partial_image_index": update.index,
            "step": update.steps_done,
            "num_steps": update.num_steps,
        }
    else:
        name = f"{kind}.completed"
        more = {
            "usage": _NO_USAGE,
            "model": update.request.called_model,
            "deadline": deadline_of([update]),
            **details_of(update),
        }
    head = {
        "type": name,
        "created_at": created_s,
        "background": "opaque",
        "output_format": request.output.image_format,
        "quality": quality_of(request),
        "size": size_text(request),
        **more,
    }
    # the image is spliced in: see the reply's module
    parts = [f"event: {name}\ndata: {json.dumps(head)[:-1]}".encode(), b', "b64_json": "']
    await append_base64(parts, update.data)
    parts.append(b'"}\n\n')
    return b"".join(parts)


def _failure(error: ApiError) -> bytes:
    # OpenAI's clients raise for data with an "error" in it
    return f"event: error\ndata: {error.body()}\n\n".encode()


class StreamSlots:
    """Bounds the streams that one caller has open at this gateway."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def slot(self, caller: str, most: int) -> Iterator[None]:
        """Hold one of ``most``.

        Raises:
            ApiError: 429, there is none left.
        """
        if self._num_open[caller] >= most:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"You have {most} event streams of this kind open, as many as are allowed; close "
                "one, or ask for a job with GET /v1/jobs/{id}.",
                code="too_many_streams",
                retry_after_s=math.inf,
            )
        self._num_open[caller] += 1
        try:
            yield
        finally:
            self._num_open -= Counter([caller])


class JobStream:
    """Follows one job of one client.

    Args:
        view: the job as it is now.
        max_s: seconds after which the stream ends.
    """

    def __init__(
        self, dispatcher: DispatcherClient, client: str, view: JobView, *, max_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._client = client
        self._view = view
        self._max_s = max_s

    async def events(self, seen: str, write: Callable[[JobView], str]) -> AsyncGenerator[bytes]:
        """Yield the events.

        Args:
            seen: id of the last event that the client has; empty to begin with the present.
            write: returns an event's data.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._max_s
        view: JobView | None = self._view
        while view is not None:
            if view.version != seen:
                name = _name(seen, view)
                yield f"id: {view.version}\nevent: {name}\ndata: {write(view)}\n\n".encode()
                seen = view.version
            else:
                yield KEEP_ALIVE
            if view.job.is_final or loop.time() >= end_s:
                return
            view = await self._next(seen, min(_KEEP_ALIVE_S, max(0.0, end_s - loop.time())))

    async def _next(self, seen: str, wait_s: float) -> JobView | None:
        """Return the job after its next change; None if it is forgotten, or nobody can tell."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + _PATIENCE_S
        while True:
            try:
                job_id = self._view.job.job_id
                return await self._dispatcher.job_change(self._client, job_id, seen, wait_s)
            except Unavailable as error:
                if loop.time() >= end_s:
                    logger.warning("the stream of a job ends: %s", error)
                    return None
                await asyncio.sleep(_RETRY_S)


def _name(seen: str, view: JobView) -> str:
    """Return the name of the event that leads from what was seen to the job as it is."""
    state = view.job.state
    if state != "running":
        return state
    if not seen.startswith("running."):
        return "started"
    # whoever comes back may say anything
    last = seen.rpartition(".")[2]
    num_seen = int(last) if last.isdecimal() and len(last) < _MANY_DIGITS else 0
    return "preview" if view.num_previews > num_seen else "progress"
