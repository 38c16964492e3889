"""What is left in the state store: by a former life, and of requests that no replica deletes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from ray_cluster.protocol.outcomes import Outcome
from ray_cluster.requests import Failure, state_name
from ray_cluster.storage.blob_store import Blob, BlobStore, BlobStoreError
from ray_cluster.storage.state_format import HEAD_BYTES, StateHeader, header_of

logger = logging.getLogger(__name__)

_SWEEP_EVERY_S = 600.0
_MAX_AGE_S = 86400.0
# writing one entry takes less than this
_MAX_PART_AGE_S = 600.0


class StateSweeper:
    """Reports the states of open requests at the start, and deletes those without a request.

    Args:
        store: where the replicas of all pools keep states; other cells' may, too.
        knows: whether a request has not ended.
        note_stored: called once with the headers of all states of open requests, by id.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self,
        store: BlobStore,
        *,
        knows: Callable[[str], bool],
        note_stored: Callable[[Mapping[str, StateHeader]], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._knows = knows
        self._note_stored = note_stored
        self._wall_clock = wall_clock
        self._ended: set[str] = set()
        self._has_ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._sweep_forever(), name="the sweep of states")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def on_outcome(self, outcome: Outcome) -> None:
        """Delete the state of a request whose end no replica brought about."""
        if isinstance(outcome, Failure) and outcome.kind in {"aborted", "lost"}:
            self._ended.add(outcome.request_id)
            self._has_ended.set()

    async def _sweep_forever(self) -> None:
        kept: dict[str, StateHeader] = {}
        await self._try(self._look, kept)
        self._note_stored(kept)
        while True:
            await self._try(self._sweep)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SWEEP_EVERY_S):
                    while True:
                        await self._has_ended.wait()
                        self._has_ended.clear()
                        await self._try(self._delete, self._take_ended())

    async def _try(self, work: Callable[..., None], *arguments: object) -> None:
        try:
            await asyncio.to_thread(work, *arguments)
        except (BlobStoreError, ValueError) as error:
            logger.warning("states of requests that ended are left for now: %s", error)

    def _look(self, kept: dict[str, StateHeader]) -> None:
        for blob in self._store.entries():
            request_id, mark, part = blob.name.partition(state_name(""))
            if mark and not part and self._knows(request_id):
                head = self._store.get(blob.name, HEAD_BYTES)
                if head is not None:
                    # a damaged one is the replica's to tell
                    with contextlib.suppress(ValueError):
                        kept[request_id] = header_of(head)

    def _take_ended(self) -> frozenset[str]:
        ended, self._ended = frozenset(self._ended), set()
        return ended

    def _delete(self, request_ids: frozenset[str]) -> None:
        self._store.delete(map(state_name, request_ids))

    def _sweep(self) -> None:
        now_s = self._wall_clock()
        self._store.delete(
            blob.name for blob in self._store.entries() if self._is_left(blob, now_s)
        )

    def _is_left(self, blob: Blob, now_s: float) -> bool:
        request_id, mark, part = blob.name.partition(state_name(""))
        if not mark:
            return False
        if part:
            return now_s - blob.changed_s > _MAX_PART_AGE_S
        return now_s - blob.changed_s > _MAX_AGE_S and not self._knows(request_id)
