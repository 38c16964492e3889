"""Named bytes in a folder or an object store: finished images, and states to go on from."""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import secrets
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, islice
from typing import Any

import fsspec

from ray_cluster.errors import RayClusterError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
_PART = ".part"
# entries of a sweep that are in memory at a time
_AT_ONCE = 1000
# what file systems raise: s3fs and gcsfs translate theirs to these
_FAILURES = (OSError, TimeoutError, ValueError)


class BlobStoreError(RayClusterError):
    """The store can't be reached, read or written; the message names it."""


@dataclass(frozen=True, slots=True)
class Blob:
    """What a store says of one entry.

    Attributes:
        changed_s: Unix time of its last write.
    """

    name: str
    num_bytes: int
    changed_s: float


class BlobStore:
    """A flat folder behind any fsspec URL. Calls block: keep them off event loops.

    An entry is there whole or not at all, whatever is killed while it is written. Writing a name
    again replaces it. Every method raises :class:`BlobStoreError`, and nothing else, when the store
    fails.

    Args:
        url: a local folder, which is made, or a URL such as ``s3://bucket/prefix``.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
            self._is_local = "file" in _protocols(self._fs)
            if self._is_local:
                self._fs.makedirs(self._root, exist_ok=True)
        except ImportError as error:
            raise BlobStoreError(
                f"cannot use {url}: {error}; 'pip install ray-cluster[cloud]' brings what s3 needs"
            ) from error
        except _FAILURES as error:
            raise BlobStoreError(f"cannot use {url}: {error}") from error

    def put(self, name: str, data: bytes) -> None:
        """Keep bytes under a name."""
        path = self._path(name)
        try:
            if not self._is_local:
                # object stores show an entry when it is whole
                self._fs.pipe_file(path, data)
                return
            part = f"{path}.{secrets.token_hex(8)}{_PART}"
            try:
                self._fs.pipe_file(part, data)
                self._fs.mv(part, path)
            except _FAILURES:
                self._remove([part])
                raise
        except _FAILURES as error:
            raise BlobStoreError(f"{self.url} did not take {name}: {error}") from error

    def get(self, name: str, num_bytes: int | None = None) -> bytes | None:
        """Return the bytes under a name, or the first of them; None if there is no such entry."""
        path = self._path(name)
        # a part costs object stores a request more
        part = {} if num_bytes is None else {"start": 0, "end": num_bytes}
        try:
            return bytes(self._fs.cat_file(path, **part))
        except FileNotFoundError:
            return None
        except _FAILURES as error:
            raise BlobStoreError(f"{self.url} did not give {name}: {error}") from error

    def delete(self, names: Iterable[str]) -> None:
        """Remove entries; names that are not there are passed over."""
        paths = [self._path(name) for name in names]
        try:
            self._remove(paths)
        except _FAILURES as error:
            raise BlobStoreError(f"{self.url} did not delete: {error}") from error

    def num_bytes(self, name: str) -> int | None:
        """Return how long an entry is; None if there is no such entry."""
        path = self._path(name)
        try:
            return int(self._fs.size(path))
        except FileNotFoundError:
            return None
        except _FAILURES as error:
            raise BlobStoreError(f"{self.url} does not tell of {name}: {error}") from error

    def entries(self) -> Iterator[Blob]:
        """Yield all entries, in no order; those of a folder take no memory, however many.

        What else lies there, under names that no entry can have, is left alone.
        """
        try:
            found = self._scan() if self._is_local else self._list()
            yield from (blob for blob in found if _NAME.fullmatch(blob.name))
        except FileNotFoundError:
            return
        except _FAILURES as error:
            raise BlobStoreError(f"{self.url} does not list its entries: {error}") from error

    def _scan(self) -> Iterator[Blob]:
        with os.scandir(self._root) as found:
            for entry in found:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        about = entry.stat()
                        yield Blob(entry.name, about.st_size, about.st_mtime)

    def _list(self) -> Iterator[Blob]:
        self._fs.invalidate_cache(self._root)
        rows = self._fs.ls(self._root, detail=True)
        return (_blob(row) for row in rows if row["type"] == "file")

    def sweep(self, *, before_s: float, max_bytes: int | None = None) -> int:
        """Remove entries older than an instant, then the oldest ones above a size.

        Args:
            before_s: Unix time; also ends what a killed process had begun to write before.
            max_bytes: what all entries together may take; None for no bound.

        Returns:
            How many were removed.
        """
        old = (blob.name for blob in self.entries() if blob.changed_s < before_s)
        num_gone = self._delete_all(old)
        if max_bytes is None:
            return num_gone
        excess = sum(blob.num_bytes for blob in self.entries()) - max_bytes
        while excess > 0:
            oldest = heapq.nsmallest(_AT_ONCE, self.entries(), key=_age)
            if not oldest:
                break
            sizes = list(accumulate(blob.num_bytes for blob in oldest))
            too_many = oldest[: bisect_left(sizes, excess) + 1]
            num_gone += self._delete_all(blob.name for blob in too_many)
            excess -= sum(blob.num_bytes for blob in too_many)
        return num_gone

    def _delete_all(self, names: Iterable[str]) -> int:
        """Delete entries, however many there are; return how many."""
        left, num_deleted = iter(names), 0
        while some := list(islice(left, _AT_ONCE)):
            self.delete(some)
            num_deleted += len(some)
        return num_deleted

    def _path(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"no name of an entry: {name[:100]!r}")
        return f"{self._root}/{name}"

    def _remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            try:
                self._fs.rm_file(path)
            except FileNotFoundError:
                continue


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _age(blob: Blob) -> tuple[float, str]:
    return blob.changed_s, blob.name


def _blob(row: dict[str, Any]) -> Blob:
    changed = row.get("mtime", row.get("LastModified", row.get("created", 0.0)))
    changed_s = changed.timestamp() if isinstance(changed, datetime) else float(changed)
    return Blob(row["name"].rpartition("/")[2], int(row["size"]), changed_s)
