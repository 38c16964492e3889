"""Images in the result store, as workers put them there and find them; tried again for a while."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ray_cluster.errors import RequestFailed
from ray_cluster.replica.retries import retry_waits_s
from ray_cluster.requests import ImageRequest
from ray_cluster.storage.blob_store import BlobStoreError
from ray_cluster.storage.inputs import OPEN_OWNER

logger = logging.getLogger(__name__)


class ResultStore(Protocol):
    """The part of a :class:`~ray_cluster.storage.blob_store.BlobStore` that is used here."""

    def put(self, name: str, data: bytes) -> None: ...

    def get(self, name: str, num_bytes: int | None = None) -> bytes | None: ...


class Results:
    """Writes images of requests until these end otherwise.

    Args:
        store: None where no request may ask for storing.
    """

    def __init__(self, store: ResultStore | None) -> None:
        self._store = store
        self._under_way: Counter[str] = Counter()
        self._writes: set[asyncio.Task[None]] = set()
        self._ended: set[str] = set()

    def note_end(self, request_id: str) -> None:
        """Do not store an image any more: its request has ended otherwise."""
        if request_id in self._under_way:
            self._ended.add(request_id)

    @contextmanager
    def work_on(self, request_id: str) -> Iterator[None]:
        """Listen to :meth:`note_end` for a request."""
        self._under_way[request_id] += 1
        try:
            yield
        finally:
            self._under_way -= Counter([request_id])
            if request_id not in self._under_way:
                self._ended.discard(request_id)

    async def put(
        self, request: ImageRequest, name: str, data: bytes, waits_s: Sequence[float] | None = None
    ) -> None:
        """Store an image, unless its request has ended.

        Args:
            waits_s: seconds between tries; of a job they go on for minutes, unless given.

        Raises:
            RequestFailed: the store did not take it.
        """
        if self._store is None:
            raise RequestFailed("this replica has no result store", "storing")
        for wait_s in (*(retry_waits_s(request) if waits_s is None else waits_s), None):
            # deleting it later could delete the image that another replica has made of it
            if request.request_id in self._ended:
                return
            try:
                await self._write(self._store, name, data)
            except BlobStoreError as error:
                logger.warning("an image is not stored: %s", error)
                if wait_s is None:
                    # clients are not to know where the store is
                    raise RequestFailed("the result store did not take it", "storing") from error
                await asyncio.sleep(wait_s)
            else:
                return

    async def _write(self, store: ResultStore, name: str, data: bytes) -> None:
        write = asyncio.create_task(asyncio.to_thread(store.put, name, data))
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)
        # a thread cannot be told to stop: whoever is cancelled leaves it to `settle`
        await asyncio.shield(write)

    async def settle(self) -> None:
        """Wait for what is being written just now."""
        await asyncio.gather(*self._writes, return_exceptions=True)

    async def get(self, request: ImageRequest, name: str) -> bytes:
        """Return an image that another worker has stored.

        Raises:
            RequestFailed: it is not there, or the store does not answer.
        """
        assert self._store is not None, "whoever reads has a store"
        for wait_s in (*retry_waits_s(request), None):
            try:
                data = await asyncio.to_thread(self._store.get, name)
            except BlobStoreError as error:
                logger.warning("an image is not read: %s", error)
                if wait_s is None:
                    raise RequestFailed("the result store did not give it", "storing") from error
                await asyncio.sleep(wait_s)
            else:
                if data is None:
                    raise RequestFailed("the image that was made is gone", "storing")
                return data
        raise AssertionError("the last try returns or raises")


def fair_client(request: ImageRequest) -> str:
    """Return whose turn it is when a request's images are coded: its client's, or its call's."""
    return request.call_id if request.owner == OPEN_OWNER else request.owner
