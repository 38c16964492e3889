"""A job's events as a stream, which any gateway can continue where another left it.

An event's id is the version of the job that it shows. So nobody stores a list of events: whoever
comes back says which version they have seen, and what differs is news.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from ray_cluster.api.errors import ApiError
from ray_cluster.api.output.event_streams import KEEP_ALIVE
from ray_cluster.errors import Unavailable
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.protocol.jobs import JobView

logger = logging.getLogger(__name__)

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
