"""Carries the images of one call through the dispatcher: all of them, or none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from ray_cluster.api.errors import from_failure
from ray_cluster.api.refusals import from_refusal
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.dispatcher import DispatcherClient
from ray_cluster.protocol.outcomes import Completed, Outcome, Preview, Sight
from ray_cluster.requests import Failure, ImageRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

# most of the small images are done within it; with a dispatcher that hangs, a call ends with an
# error after this and the patience with it
_FIRST_WAIT_S = 1.0


class GroupRunner:
    """Offers groups of image requests, waits for them, and gives up what nobody waits for.

    Args:
        wait_s: returns the seconds that one wait may take now; well below the dispatcher's
            ``attached_timeout_s``, as every wait tells it that the client is still there.
        on_left: told of a group that was admitted and has ended without a reply.
    """

    def __init__(
        self,
        client: DispatcherClient,
        wait_s: Callable[[], float],
        on_left: Callable[[Sequence[ImageRequest]], None],
    ) -> None:
        self._client = client
        self._wait_s = wait_s
        self._on_left = on_left
        self._aborts: set[asyncio.Task[None]] = set()

    async def run(
        self, requests: Sequence[ImageRequest], known_models: Sequence[str], client: str
    ) -> list[Completed]:
        """Return the finished images in the order of their requests.

        However it ends, nothing of the group is left with the dispatcher.

        Args:
            client: whose call it is.

        Raises:
            ApiError: not admitted, or an image failed; the others are aborted then.
        """
        pending = {request.request_id: None for request in requests}
        completed: dict[str, Completed] = {}
        is_left = True
        try:
            wait_s = min(self._wait_s(), _FIRST_WAIT_S)
            reply = await self._client.submit(tuple(requests), client, wait_s)
            # these ids are random: a duplicate is this very offer, sent again after a lost reply
            if not reply.offer.accepted and reply.offer.reason != "duplicate_id":
                pending.clear()
                is_left = False
                raise from_refusal(reply.offer, requests, known_models)
            _sort(reply.outcomes, pending, completed)
            while pending:
                outcomes = await self._client.wait(tuple(pending), self._wait_s())
                _sort(outcomes, pending, completed)
            is_left = False
        except DispatcherUnavailable:
            # whoever does not answer this would not answer the abort either: the client shall
            # hear of it at once
            self._start_abort(tuple(pending))
            pending.clear()
            raise
        finally:
            if is_left:
                self._on_left(requests)
            if pending:
                await asyncio.shield(self._start_abort(tuple(pending)))
        return [completed[request.request_id] for request in requests]

    async def watch(
        self, request: ImageRequest, known_models: Sequence[str], client: str
    ) -> AsyncGenerator[Preview | Completed | None]:
        """Have one image made, and tell what there is to see of it.

        Yields None once it is admitted and whenever there has been nothing new for a while, then
        its previews, at last the image. However it ends, nothing is left with the dispatcher.

        Raises:
            ApiError: not admitted, or the image failed.
        """
        is_open, seen = True, -1
        try:
            reply = await self._client.submit((request,), client, 0.0)
            if not reply.offer.accepted and reply.offer.reason != "duplicate_id":
                is_open = False
                raise from_refusal(reply.offer, [request], known_models)
            yield None
            # it may have ended at once
            sight = Sight(reply.outcomes.get(request.request_id))
            while sight.outcome is None:
                sight = await self._client.watch(request.request_id, seen, self._wait_s())
                if sight.outcome is None:
                    seen = seen if sight.preview is None else sight.preview.index
                    yield sight.preview
            is_open = False
            completed: dict[str, Completed] = {}
            _sort({request.request_id: sight.outcome}, {request.request_id: None}, completed)
            yield completed[request.request_id]
        except DispatcherUnavailable:
            self._start_abort([request.request_id])
            is_open = False
            raise
        finally:
            if is_open:
                await asyncio.shield(self._start_abort([request.request_id]))

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
            # it gives them up by itself, as nobody waits for them any more
            logger.warning(
                "could not abort %s: the dispatcher does not answer", ", ".join(request_ids)
            )


def _sort(
    outcomes: dict[str, Outcome], pending: dict[str, None], completed: dict[str, Completed]
) -> None:
    """Move finished images from ``pending`` to ``completed``; raise for the first failed one."""
    failure: Failure | None = None
    for request_id in [request_id for request_id in pending if request_id in outcomes]:
        outcome = outcomes[request_id]
        del pending[request_id]
        if isinstance(outcome, Completed):
            completed[request_id] = outcome
        else:
            failure = failure or outcome
    if failure is not None:
        # the dispatcher's log tells of it
        raise from_failure(failure)


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
