"""Light images in the result store: published under their public names, or deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from ray_cluster.protocol.outcomes import Completed, Deferred, Outcome
from ray_cluster.requests import Failure, candidate_name, file_name
from ray_cluster.storage.blob_store import BlobStoreError

logger = logging.getLogger(__name__)

# after a failure
_RETRY_S = (0.2, 1.0, 3.0, 10.0)
_CLOSING_S = 2.0


class NamedStore(Protocol):
    """The part of a :class:`~ray_cluster.storage.blob_store.BlobStore` that is used here."""

    def rename(self, name: str, new_name: str) -> None: ...

    def delete(self, names: list[str]) -> None: ...


class Candidates:
    """Publishes light images before their requests' ends are told; on one event loop.

    Attributes:
        deferred: ids of requests whose heavy image is being made, with a light one in the store.
    """

    def __init__(self, store: NamedStore) -> None:
        self._store = store
        self._publishing: dict[str, asyncio.Task[None]] = {}
        self._deleting: set[asyncio.Task[None]] = set()
        self.deferred: set[str] = set()

    def __contains__(self, request_id: object) -> bool:
        """Whether an image is being published: its request has not ended for its client."""
        return request_id in self._publishing

    def note(self, deferred: Deferred) -> None:
        """Note that a light image stays in the store while its heavy one is made."""
        if deferred.is_stored:
            self.deferred.add(deferred.request_id)

    def settle(self, outcome: Outcome, then: Callable[[Outcome], None]) -> None:
        """Call back with an outcome, at once unless its image is to be published first."""
        request_id = outcome.request_id
        is_kept = request_id in self.deferred
        self.deferred.discard(request_id)
        if isinstance(outcome, Completed) and outcome.is_candidate:
            task = asyncio.create_task(self._publish(outcome, then))
            self._publishing[request_id] = task
            return
        if is_kept:
            self._spawn(self._delete(request_id))
        then(outcome)

    async def _publish(self, outcome: Completed, then: Callable[[Outcome], None]) -> None:
        request_id = outcome.request_id
        published: Outcome = replace(outcome, is_candidate=False)
        public = file_name(request_id, outcome.result.image_format)
        for wait_s in (*_RETRY_S, None):
            try:
                await asyncio.to_thread(self._store.rename, candidate_name(request_id), public)
                break
            except BlobStoreError as error:
                logger.warning("an image is not published: %s", error)
                if wait_s is None:
                    message = "the result store did not publish it"
                    published = Failure(
                        request_id, "error", message, "storing", attempts=outcome.attempts
                    )
                else:
                    await asyncio.sleep(wait_s)
        del self._publishing[request_id]
        then(published)

    async def _delete(self, request_id: str) -> None:
        try:
            await asyncio.to_thread(self._store.delete, [candidate_name(request_id)])
        except BlobStoreError as error:
            logger.warning("a light image is left to the sweep: %s", error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._deleting.add(task)
        task.add_done_callback(self._deleting.discard)

    async def close(self) -> None:
        """Wait a moment for what is under way, and give up the rest."""
        tasks = [*self._publishing.values(), *self._deleting]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING_S)
        for task in tasks:
            task.cancel()
