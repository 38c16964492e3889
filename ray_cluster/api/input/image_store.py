"""The input store as calls use it: ids of its files, and what each client may have there.

An id is made of a file's digest and size, so that nothing has to be remembered.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from ray_cluster.api.errors import ApiError
from ray_cluster.requests import BlobRef
from ray_cluster.storage.blob_store import BlobStoreError
from ray_cluster.storage.inputs import InputStore

# what the smallest file counts as: it bounds their number, too
_LEAST_BYTES = 64 << 10

FILE_PREFIX = "file-"
_FILE_ID = re.compile(FILE_PREFIX + r"([0-9a-f]{64})-([1-9][0-9]{0,14})")
ID_PATTERN = f"^{_FILE_ID.pattern}$"


@dataclass(slots=True)
class _Sent:
    """What a client has sent in one period."""

    digests: set[str] = field(default_factory=set)
    num_bytes: int = 0


class StoredBytes:
    """Counts what each client has sent to the input store through this gateway.

    What is sent in one period of ``grace_s`` is deleted in the next but one, unless an unfinished
    request uses it (:class:`~ray_cluster.storage.inputs.InputStore`). So what a client has sent in
    this period and in the one before counts; the same image once for each.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(self, grace_s: float, clock: Callable[[], float] = time.time) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._sent: defaultdict[int, defaultdict[str, _Sent]] = defaultdict(
            lambda: defaultdict(_Sent)
        )
        self._arriving: defaultdict[str, int] = defaultdict(int)
        # inputs are renewed in threads
        self._lock = threading.RLock()

    def of(self, client: str) -> int:
        """Return how many bytes of a client are there, or arriving."""
        period = self._period
        with self._lock:
            for past in [one for one in self._sent if one < period - 1]:
                del self._sent[past]
            return self._arriving.get(client, 0) + sum(
                clients[client].num_bytes for clients in self._sent.values() if client in clients
            )

    def note(self, client: str, ref: BlobRef) -> None:
        """Count an image that is stored."""
        with self._lock:
            sent = self._sent[self._period][client]
            if ref.sha256 not in sent.digests:
                sent.digests.add(ref.sha256)
                sent.num_bytes += max(ref.num_bytes, _LEAST_BYTES)

    @contextmanager
    def again(self, client: str, ref: BlobRef, most: int) -> Iterator[Callable[[], None]]:
        """Count an image that is stored once more while that is tried, and give what keeps it.

        Raises:
            ApiError: 429, the period has not seen it, and the client would have too much.
        """
        with self._lock:
            sent = self._sent[self._period][client]
            mine = 0 if ref.sha256 in sent.digests else max(ref.num_bytes, _LEAST_BYTES)
            if mine and (num_bytes := self.of(client) + mine) > most:
                raise self._too_many(num_bytes, most)
            self._arriving[client] += mine
        try:
            yield lambda: self.note(client, ref)
        finally:
            self._arrived(client, mine)

    def _arrived(self, client: str, num_bytes: int) -> None:
        with self._lock:
            self._arriving[client] -= num_bytes
            if not self._arriving[client]:
                del self._arriving[client]

    @asynccontextmanager
    async def arriving(
        self, client: str, chunks: AsyncIterator[bytes], most: int
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Give the same bytes, which count as arriving until this is left: note them before.

        Raises:
            ApiError: 429, the client would have more than ``most``; the bytes raise it, too.
        """
        mine, is_whole = 0, False

        def count(num_bytes: int) -> None:
            nonlocal mine
            mine += num_bytes
            with self._lock:
                self._arriving[client] += num_bytes
            if (in_all := self.of(client)) > most:
                raise self._too_many(in_all, most)

        async def counted() -> AsyncGenerator[bytes, None]:
            nonlocal is_whole
            num_bytes = 0
            async for chunk in chunks:
                num_bytes += len(chunk)
                count(max(0, num_bytes - mine))
                yield chunk
            is_whole = True

        try:
            count(_LEAST_BYTES)
            async with aclosing(counted()) as same:
                yield same
        except asyncio.CancelledError:
            if is_whole:
                # the store's thread goes on: it may be there, though nobody notes it
                self._sent[self._period][client].num_bytes += mine
            raise
        finally:
            self._arrived(client, mine)

    def _too_many(self, num_bytes: int, most: int) -> ApiError:
        return ApiError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"With this image, those that you have sent would take {num_bytes} bytes; at most "
            f"{most} are kept for one client (limits.max_stored_bytes_per_client). Name images "
            "that you use again by the ids of uploaded files; what is not used any more is "
            f"deleted after {self._grace_s:g} s.",
            code="too_many_stored_images",
            retry_after_s=self._grace_s,
            retry="asked",
        )

    @property
    def _period(self) -> int:
        return int(self._clock() // self._grace_s)


@dataclass(frozen=True, slots=True)
class ClientInputs:
    """The input store as one client's calls may use it.

    Attributes:
        client: whose bytes are counted.
        most: how many it may have there.
    """

    inputs: InputStore
    stored: StoredBytes
    client: str
    most: int

    async def put(self, owner: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> BlobRef:
        """Store an input; see :meth:`.InputStore.put`.

        Raises:
            ApiError: 429, the client has too much there.
        """
        async with self.stored.arriving(self.client, chunks, self.most) as counted:
            ref = await self.inputs.put(owner, counted, max_bytes=max_bytes)
            self.stored.note(self.client, ref)
        return ref

    def get(self, owner: str, ref: BlobRef) -> bytes:
        """Return an input that is there. Blocks; raises :class:`.BlobStoreError`."""
        data = self.inputs.get(owner, ref)
        if data is None:
            raise BlobStoreError("an image is gone that was stored a moment ago")
        return data

    def renew(self, owner: str, ref: BlobRef) -> bool:
        """Keep an input as if it were sent again now; see :meth:`.InputStore.renew`. Blocks."""
        with self.stored.again(self.client, ref, self.most) as keep:
            is_there = self.inputs.renew(owner, ref)
            if is_there:
                keep()
        return is_there


def file_id_of(ref: BlobRef) -> str:
    """Return the id of a file; only whoever has its bytes can know it."""
    return f"{FILE_PREFIX}{ref.sha256}-{ref.num_bytes}"


def file_of_id(file_id: str) -> BlobRef | None:
    """Return the file that an id names; None for what is no id."""
    found = _FILE_ID.fullmatch(file_id)
    return None if found is None else BlobRef(found[1], int(found[2]))
