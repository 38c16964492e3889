"""A job's events as a stream (SSE), which any gateway can take up where another left it.

An event's id is the version of the job that it tells of. So nobody keeps a list of events: whoever
comes back says what they have seen, and what differs is news.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http import HTTPStatus

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ray_cluster.api.errors import ApiError
from ray_cluster.errors import Unavailable
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.protocol.jobs import JobView

logger = logging.getLogger(__name__)

# "queued" and the final states by their own names; a running job's events by what is new
EVENT_NAMES = ("queued", "started", "progress", "preview", "completed", "failed", "cancelled")
_RETRY_S = 0.5
# of a number of previews; Python refuses to read numbers of thousands
_MANY_DIGITS = 10
_KEEP_ALIVE = b": still there\n\n"


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds of one stream.

    Attributes:
        max_s: seconds after which it ends.
        keep_alive_s: longest silence; proxies close connections that are silent for long.
        patience_s: seconds without an answer after which it ends.
    """

    max_s: float
    keep_alive_s: float = 10.0
    patience_s: float = 60.0


class StreamPlaces:
    """Bounds the streams that one caller has open at this gateway."""

    def __init__(self) -> None:
        self._num_open: Counter[str] = Counter()

    @contextmanager
    def place(self, caller: str, most: int) -> Iterator[None]:
        """Hold one of ``most``.

        Raises:
            ApiError: 429, there is none left.
        """
        if self._num_open[caller] >= most:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"You have {most} event streams open, as many as are allowed "
                "(limits.max_streams_per_client); close one, or ask with GET /v1/jobs/{id}.",
                code="too_many_streams",
                retry_after_s=math.inf,
            )
        self._num_open[caller] += 1
        try:
            yield
        finally:
            self._num_open -= Counter([caller])


class _PlacedResponse(StreamingResponse):
    """A stream that holds something until it has ended, however it does."""

    def __init__(self, events: AsyncIterator[bytes], held: ExitStack) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one ASGI connection."""
        with self._held:
            await super().__call__(scope, receive, send)


class JobStream:
    """Follows one job of one client.

    Args:
        view: the job as it is now.
    """

    def __init__(
        self, dispatcher: DispatcherClient, client: str, view: JobView, limits: StreamLimits
    ) -> None:
        self._dispatcher = dispatcher
        self._client = client
        self._view = view
        self._limits = limits

    def response(
        self, *, after: str | None, write: Callable[[JobView], str], held: ExitStack
    ) -> StreamingResponse:
        """Return the stream.

        Args:
            after: id of the last event that the client has seen; None to begin with the present.
            write: returns an event's data.
            held: closed when the stream has ended.
        """
        return _PlacedResponse(self._events(after, write), held)

    async def _events(
        self, after: str | None, write: Callable[[JobView], str]
    ) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._limits.max_s
        seen = after or ""
        view: JobView | None = self._view
        # an empty line at once: clients learn that the stream is open
        yield b"retry: 1000\n\n"
        while view is not None:
            if view.version != seen:
                yield _event(_name(seen, view), view.version, write(view))
                seen = view.version
            else:
                yield _KEEP_ALIVE
            if view.job.is_final or loop.time() >= end_s:
                return
            wait_s = min(self._limits.keep_alive_s, max(0.0, end_s - loop.time()))
            view = await self._next(seen, wait_s)

    async def _next(self, seen: str, wait_s: float) -> JobView | None:
        """Return the job after its next change; None if it is forgotten, or nobody can tell."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._limits.patience_s
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


def _event(name: str, event_id: str, data: str) -> bytes:
    return f"id: {event_id}\nevent: {name}\ndata: {data}\n\n".encode()
