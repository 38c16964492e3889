"""Has the images of one call made by the dispatcher: all of them, or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from ray_cluster.api.output.error_answers import from_failure, from_refusal
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.protocol.outcomes import Completed, Outcome, Preview
from ray_cluster.requests import Failure, ImageRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

# most of the small images are done within it; with a dispatcher that hangs, a call ends with an
# error after this and the patience with it
_FIRST_WAIT_S = 1.0


@dataclass(slots=True)
class _Group:
    """An admitted group: ids of its images that have not ended, and those that are made."""

    pending: dict[str, None]
    completed: dict[str, Completed] = field(default_factory=dict)

    def take(self, outcomes: Mapping[str, Outcome]) -> None:
        """Note which images have ended; raise :class:`ApiError` for the first that failed."""
        failure: Failure | None = None
        for request_id in [one for one in self.pending if one in outcomes]:
            outcome = outcomes[request_id]
            del self.pending[request_id]
            if isinstance(outcome, Completed):
                self.completed[request_id] = outcome
            else:
                failure = failure or outcome
        if failure is not None:
            # the dispatcher's log has it
            raise from_failure(failure)


class GroupRunner:
    """Offers groups of image requests, waits for them, and aborts what nobody waits for.

    Args:
        wait_s: returns the seconds that one wait may take now; well below the dispatcher's
            ``attached_timeout_s``, as every wait shows it that the client is still there.
        on_abandoned: called with a group that may have been admitted and ends without a reply.
    """

    def __init__(
        self,
        client: DispatcherClient,
        wait_s: Callable[[], float],
        on_abandoned: Callable[[Sequence[ImageRequest]], None],
    ) -> None:
        self._client = client
        self._wait_s = wait_s
        self._on_abandoned = on_abandoned
        self._aborts: set[asyncio.Task[None]] = set()

    async def run(
        self, requests: Sequence[ImageRequest], known_models: Sequence[str], client: str
    ) -> list[Completed]:
        """Return the finished images in the order of their requests.

        Args:
            client: whose call it is.

        Raises:
            ApiError: not admitted, or an image failed; the others are aborted then.
        """
        wait_s = min(self._wait_s(), _FIRST_WAIT_S)
        async with self._admitted(requests, known_models, client, wait_s) as (group, first):
            group.take(first)
            while group.pending:
                group.take(await self._client.wait(tuple(group.pending), self._wait_s()))
        return [group.completed[request.request_id] for request in requests]

    async def watch(
        self, request: ImageRequest, known_models: Sequence[str], client: str
    ) -> AsyncGenerator[Preview | Completed | None]:
        """Have one image made; yield its previews, at last the image.

        Yields None once it is admitted and whenever nothing has happened for a while.

        Raises:
            ApiError: not admitted, or the image failed.
        """
        request_id, seen = request.request_id, -1
        async with self._admitted([request], known_models, client, 0.0) as (group, first):
            yield None
            # it may have ended at once
            group.take(first)
            while group.pending:
                update = await self._client.watch(request_id, seen, self._wait_s())
                if update.outcome is not None:
                    group.take({request_id: update.outcome})
                else:
                    seen = seen if update.preview is None else update.preview.index
                    yield update.preview
        yield group.completed[request_id]

    @asynccontextmanager
    async def _admitted(
        self,
        requests: Sequence[ImageRequest],
        known_models: Sequence[str],
        client: str,
        wait_s: float,
    ) -> AsyncIterator[tuple[_Group, Mapping[str, Outcome]]]:
        """Have a group admitted; yield it with the outcomes that came with the answer.

        However this ends, nothing is left with the dispatcher.
        """
        group = _Group(dict.fromkeys(request.request_id for request in requests))
        is_abandoned = True
        try:
            reply = await self._client.submit(tuple(requests), client, wait_s)
            # these ids are random: a duplicate is this very offer, sent again after a lost reply
            if not reply.offer.accepted and reply.offer.reason != "duplicate_id":
                group.pending.clear()
                is_abandoned = False
                raise from_refusal(reply.offer, requests, known_models)
            yield group, reply.outcomes
            is_abandoned = False
        except DispatcherUnavailable:
            # whoever does not answer this would not answer the abort either: the client gets the
            # error at once
            self._start_abort(tuple(group.pending))
            group.pending.clear()
            raise
        finally:
            if is_abandoned:
                self._on_abandoned(requests)
            if group.pending:
                await asyncio.shield(self._start_abort(tuple(group.pending)))

    def _start_abort(self, request_ids: Sequence[str]) -> asyncio.Task[None]:
        # a task of its own: whoever cancels this handler again must not stop the abort. And in a
        # context of its own: Serve cancels what a cancelled request has called, by context, and
        # the dispatcher's address is asked for over Serve
        task = asyncio.create_task(self._try_abort(request_ids), context=Context())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)
        return task

    async def _try_abort(self, request_ids: Sequence[str]) -> None:
        try:
            await self._client.abort(tuple(request_ids))
        except DispatcherUnavailable:
            # it aborts them by itself, as nobody waits for them any more
            logger.warning(
                "could not abort %s: the dispatcher does not answer", ", ".join(request_ids)
            )


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; cancel it when the client goes away.

    The body must have been read: after it, all that a server still delivers is the disconnect.
    uvicorn only says so when asked; Ray Serve also cancels the handler, which cancels ``work``.

    Raises:
        ClientDisconnect: the client is gone.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
