"""Images of earlier stages in the result store: published under their public names, or deleted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import Failure, candidate_name, file_name
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError

logger = logging.getLogger(__name__)

# after a failure
_RETRY_S = (0.2, 1.0, 3.0, 10.0)
_CLOSING_S = 2.0


class Candidates:
    """Publishes images before their requests' ends are told; on one event loop."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._publishing: dict[str, asyncio.Task[None]] = {}
        self._deleting: set[asyncio.Task[None]] = set()

    def __contains__(self, request_id: object) -> bool:
        """Whether an image is being published: its request has not ended for its client."""
        return request_id in self._publishing

    def settle(self, outcome: Outcome, then: Callable[[Outcome], None]) -> None:
        """Call back with an outcome, at once unless its image is to be published first."""
        if isinstance(outcome, Completed) and outcome.is_candidate:
            task = asyncio.create_task(self._publish(outcome, then))
            self._publishing[outcome.request_id] = task
            return
        then(outcome)

    def delete(self, names: list[str]) -> None:
        """Delete those that are not published."""
        if names:
            task = asyncio.create_task(self._delete(names))
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

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

    async def _delete(self, names: list[str]) -> None:
        try:
            await asyncio.to_thread(self._store.delete, names)
        except BlobStoreError as error:
            logger.warning("images of earlier stages are left to the sweep: %s", error)

    async def close(self) -> None:
        """Wait a moment for what is under way, and give up the rest."""
        tasks = [*self._publishing.values(), *self._deleting]
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSING_S)
        for task in tasks:
            task.cancel()
