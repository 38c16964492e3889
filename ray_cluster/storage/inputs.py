"""The images that clients send: stored once under their digest, apart for each client."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from itertools import islice

from ray_cluster.errors import RayClusterError
from ray_cluster.requests import BlobRef, ImageRequest
from ray_cluster.storage.blob_store import (
    PART_SUFFIX,
    Blob,
    BlobStore,
    BlobStoreError,
    BlobWriter,
)

# the owner of all inputs of a service without API keys
OPEN_OWNER = "open"

_OWNER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ENTRY = re.compile(r"(?P<input>[A-Za-z0-9_-]{1,64}\.[0-9a-f]{64})\.(?P<generation>[0-2])")
_NUM_GENERATIONS = 3
# share of a period in which a sweep deletes: the rest covers clocks that differ between machines
_SWEPT_SHARE = 0.75
_PIECE_BYTES = 1 << 20
_DELETED_AT_ONCE = 100


class InputTooLarge(RayClusterError):
    """An input has more bytes than are allowed."""


def input_name(owner: str, ref: BlobRef) -> str:
    """Return the name of an input, without its generation."""
    return f"{owner}.{ref.sha256}"


def input_names(requests: Iterable[ImageRequest]) -> frozenset[str]:
    """Return the names of all inputs of these requests."""
    return frozenset(input_name(one.owner, ref) for one in requests for ref in one.inputs)


class InputStore:
    """Stores inputs by owner and digest: no client can read, or find, what another has sent.

    A sweep must never delete what is sent again at the same moment. So an entry's name ends in its
    generation: the number of the period of ``grace_s`` seconds in which it was sent, modulo 3. An
    upload writes the present generation; a sweep deletes the one of two periods ago, which nobody
    writes before the next period.

    Args:
        blobs: of this cell alone.
        grace_s: age in seconds below which nothing is deleted.
        wall_clock: Unix time in seconds; the clocks of all machines differ by less than a quarter
            of ``grace_s``.
    """

    def __init__(
        self, blobs: BlobStore, *, grace_s: float, wall_clock: Callable[[], float]
    ) -> None:
        self._blobs = blobs
        self.grace_s = grace_s
        self._wall_clock = wall_clock

    @classmethod
    def open(cls, url: str, *, grace_s: float) -> InputStore:
        """Return the store at a folder or URL, on this machine's clock. Blocks.

        Raises:
            BlobStoreError: it cannot be opened.
        """
        return cls(BlobStore(url), grace_s=grace_s, wall_clock=time.time)

    def check(self) -> None:
        """Raise :class:`BlobStoreError` unless it can be written. Blocks."""
        self._blobs.check()

    async def put(self, owner: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> BlobRef:
        """Store an input while it arrives, and return what names it.

        Its grace age starts now, even if the same bytes were there before. It can be read once this
        returns.

        Args:
            owner: of the client, by its name or its API key's digest, or :data:`OPEN_OWNER`.

        Raises:
            InputTooLarge: it has more than ``max_bytes``.
            BlobStoreError: the store failed.
            ValueError: the owner is no name of an owner.
        """
        if _OWNER.fullmatch(owner) is None:
            raise ValueError(f"no owner of inputs: {owner[:100]!r}")
        writer = self._blobs.writer()
        try:
            ref = await _write(writer, chunks, max_bytes)
            await asyncio.to_thread(self._commit, writer, owner, ref)
        except BaseException:
            # not awaited: whoever is cancelled may not have the time
            asyncio.get_running_loop().run_in_executor(None, writer.discard)
            raise
        return ref

    def renew(self, owner: str, ref: BlobRef) -> bool:
        """Keep an input as if it were sent again now; False if it is not there. Blocks.

        Raises:
            BlobStoreError: the store failed.
            ValueError: as of :meth:`get`.
        """
        latest, *_ = names = list(self._entries_of(owner, ref))
        for name in names:
            blob = self._blobs.find(name)
            if blob is not None and blob.num_bytes == ref.num_bytes:
                return self._blobs.copy(name, latest)
        return False

    def _commit(self, writer: BlobWriter, owner: str, ref: BlobRef) -> None:
        writer.commit(f"{input_name(owner, ref)}.{self._period % _NUM_GENERATIONS}")

    def get(self, owner: str, ref: BlobRef) -> bytes | None:
        """Return an input's bytes; None if its owner has not sent it, or it is swept. Blocks.

        Raises:
            BlobStoreError: the store failed, or returned other bytes than were sent.
            ValueError: owner or digest cannot be the name of an input.
        """
        for name in self._entries_of(owner, ref):
            data = self._blobs.get(name)
            if data is None:
                continue
            if hashlib.sha256(data).hexdigest() != ref.sha256:
                raise BlobStoreError(f"{self._blobs.url} has damaged bytes under {name}")
            return data
        return None

    def sent_s(self, owner: str, ref: BlobRef) -> float | None:
        """Return when an input was last sent, in Unix time; None as of :meth:`get`. Blocks.

        Raises:
            BlobStoreError: the store failed.
            ValueError: as of :meth:`get`.
        """
        for name in self._entries_of(owner, ref):
            blob = self._blobs.find(name)
            if blob is not None and blob.num_bytes == ref.num_bytes:
                return blob.changed_s
        return None

    def _entries_of(self, owner: str, ref: BlobRef) -> Iterator[str]:
        """Yield the names that an input may have, the latest first."""
        if _OWNER.fullmatch(owner) is None or _SHA256.fullmatch(ref.sha256) is None:
            raise ValueError(f"no name of an input: {input_name(owner, ref)[:200]!r}")
        latest = self._period
        for period in range(latest, latest - _NUM_GENERATIONS, -1):
            yield f"{input_name(owner, ref)}.{period % _NUM_GENERATIONS}"

    def sweep(self, *, sent_before_s: float, keep: Collection[str]) -> int:
        """Delete old inputs, and what killed uploads have left; return how many. Blocks.

        Args:
            sent_before_s: Unix time; what was sent later stays.
            keep: names of inputs that stay, whatever their age; see :func:`input_names`.

        Raises:
            BlobStoreError: the store failed; the rest is left to the next sweep.
        """
        names = self._swept(sent_before_s, keep)
        num_deleted = 0
        while some := list(islice(names, _DELETED_AT_ONCE)):
            self._blobs.delete(some)
            num_deleted += len(some)
        return num_deleted

    def _swept(self, sent_before_s: float, keep: Collection[str]) -> Iterator[str]:
        old = (blob for blob in self._blobs.entries() if blob.changed_s < sent_before_s)
        return (blob.name for blob in old if self._is_left(blob, keep))

    def _is_left(self, blob: Blob, keep: Collection[str]) -> bool:
        if blob.name.endswith(PART_SUFFIX):
            return True
        entry = _ENTRY.fullmatch(blob.name)
        if entry is None or entry["input"] in keep:
            return False
        period, since = divmod(self._wall_clock() / self.grace_s, 1.0)
        is_two_ago = int(entry["generation"]) == (int(period) - 2) % _NUM_GENERATIONS
        return is_two_ago and since < _SWEPT_SHARE

    @property
    def _period(self) -> int:
        return int(self._wall_clock() // self.grace_s)


async def _write(writer: BlobWriter, chunks: AsyncIterator[bytes], max_bytes: int) -> BlobRef:
    digest, num_bytes, piece = hashlib.sha256(), 0, bytearray()

    def append(data: bytearray) -> None:
        digest.update(data)
        writer.write(data)

    async for chunk in chunks:
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise InputTooLarge(f"an input has more than the {max_bytes} bytes allowed")
        piece += chunk
        if len(piece) >= _PIECE_BYTES:
            await asyncio.to_thread(append, piece)
            piece = bytearray()
    await asyncio.to_thread(append, piece)
    return BlobRef(digest.hexdigest(), num_bytes)
