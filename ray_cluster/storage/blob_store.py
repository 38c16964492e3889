"""Named bytes in a folder or an object store: finished images, states, inputs."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any

import fsspec

from ray_cluster.errors import RayClusterError, without_password
from ray_cluster.storage.excess import Excess
from ray_cluster.storage.s3 import TRIES, lacks_credentials, s3_options
from ray_cluster.storage.syncing import make_folder, sync_file, sync_folder

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
# ends the names of entries that are not written to their end
PART_SUFFIX = ".part"
# of an entry that is written piece by piece, as object stores take them; s3 has a least size
_BLOCK_BYTES = 8 << 20
# names that are deleted at a time
_AT_ONCE = 1000


class BlobStoreError(RayClusterError):
    """The store can't be reached, read or written; the message names it."""


class StoreRefuses(BlobStoreError):
    """The store is missing or closed to this process, and will be until somebody mends that."""


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
    again replaces it. What was written to a folder survives a power failure; elsewhere it is as
    safe as the store's own answer. Every method raises :class:`BlobStoreError`, and nothing else,
    when the store fails.

    Args:
        url: a local folder, which is made, or a URL such as ``s3://bucket/prefix``.
        is_durable: False for entries of which a power failure may take the latest: a folder does
            not wait for the disk then.
    """

    def __init__(self, url: str, *, is_durable: bool = True) -> None:
        # as errors show it
        self.url = without_password(url)
        try:
            self._fs, self._root = _open(url)
            self._is_local = "file" in _protocols(self._fs)
            self._is_synced = self._is_local and is_durable
            if self._is_local:
                make_folder(self._root)
        except ImportError as error:
            raise BlobStoreError(
                f"cannot use {self.url}: {error}; 'pip install ray-cluster[cloud]' brings what s3 "
                "needs"
            ) from error
        except Exception as error:
            raise BlobStoreError(f"cannot use {self.url}: {error}") from error

    def check(self) -> None:
        """Write an entry and remove it: a bucket that is missing or closed looks like an empty one.

        Raises:
            StoreRefuses: it is missing, or closed to this process.
            BlobStoreError: it fails just now.
        """
        name = f"{secrets.token_hex(16)}{PART_SUFFIX}"
        try:
            self.put(name, b"")
            self.delete([name])
        except BlobStoreError as error:
            cause = error.__cause__
            refuses = isinstance(cause, FileNotFoundError | PermissionError)
            kind = StoreRefuses if refuses or lacks_credentials(cause) else BlobStoreError
            raise kind(f"cannot use {self.url}: {cause}") from cause

    def put(self, name: str, data: bytes) -> None:
        """Write an entry."""
        path = self._path(name)
        with self._failing(f"did not take {name}"):
            if self._is_local:
                with self._replacing(path) as part:
                    self._fs.pipe_file(part, data)
            else:
                # object stores show an entry when it is whole
                self._fs.pipe_file(path, data)

    @contextlib.contextmanager
    def _replacing(self, path: str) -> Iterator[str]:
        """Yield the path of a file that is to become an entry; it is gone if that fails."""
        part = f"{path}.{secrets.token_hex(8)}{PART_SUFFIX}"
        try:
            yield part
            if self._is_synced:
                sync_file(part)
            self._fs.mv(part, path)
            self._sync_names()
        except Exception:
            self._remove([part])
            raise

    def _sync_names(self) -> None:
        if self._is_synced:
            sync_folder(self._root)

    def rename(self, name: str, new_name: str) -> None:
        """Give an entry another name, in place of what has that; a second time changes nothing."""
        path, new_path = self._path(name), self._path(new_name)
        with self._failing(f"did not rename {name}"):
            try:
                if self._is_local:
                    self._fs.mv(path, new_path)
                else:
                    self._fs.cp_file(path, new_path)
                    self._remove([path])
            except FileNotFoundError:
                # the first time may have failed after it was done
                if not self._fs.exists(new_path):
                    raise
            self._sync_names()

    def copy(self, name: str, new_name: str) -> bool:
        """Write an entry under another name, in place of what has that; False if it is gone.

        Under its own, only the time of its last write changes, and in object stores nothing.
        """
        path, new_path = self._path(name), self._path(new_name)
        with self._failing(f"did not copy {name}"), contextlib.suppress(FileNotFoundError):
            if name != new_name and self._is_local:
                with self._replacing(new_path) as part:
                    self._fs.cp_file(path, part)
            elif name != new_name:
                self._fs.cp_file(path, new_path)
            elif self._is_local:
                os.utime(path)
            return True
        return False

    def writer(self) -> BlobWriter:
        """Return a writer of one entry, piece by piece."""
        return BlobWriter(self)

    def get(self, name: str, num_bytes: int | None = None) -> bytes | None:
        """Return an entry's bytes, or the first of them; None if there is no such entry."""
        path = self._path(name)
        # a part costs object stores a request more
        part = {} if num_bytes is None else {"start": 0, "end": num_bytes}
        with self._failing(f"did not give {name}"), contextlib.suppress(FileNotFoundError):
            try:
                return bytes(self._fs.cat_file(path, **part))
            except OSError as error:
                # in s3 an empty entry has no first bytes
                if not part or error.errno != errno.EINVAL:
                    raise
                return bytes(self._fs.cat_file(path))[:num_bytes]
        return None

    def delete(self, names: Iterable[str]) -> None:
        """Remove entries; missing ones are ignored."""
        paths = [self._path(name) for name in names]
        with self._failing("did not delete"):
            self._remove(paths)

    def num_bytes(self, name: str) -> int | None:
        """Return the size of an entry; None if there is no such entry."""
        found = self.find(name)
        return None if found is None else found.num_bytes

    def find(self, name: str) -> Blob | None:
        """Return what an entry is; None if there is no such entry."""
        path = self._path(name)
        with self._failing(f"does not describe {name}"), contextlib.suppress(FileNotFoundError):
            return _blob(self._fs.info(path))
        return None

    def entries(self) -> Iterator[Blob]:
        """Yield all entries, in no order; those of a folder are never in memory all at once.

        Files whose names no entry can have are left out.
        """
        with self._failing("does not list its entries"), contextlib.suppress(FileNotFoundError):
            found = self._scan() if self._is_local else self._list()
            yield from (blob for blob in found if _NAME.fullmatch(blob.name))

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
        excess = None if max_bytes is None else Excess(max_bytes)
        num_gone = self._delete_all(self._old(before_s, excess))
        if excess is not None:
            num_gone += self._delete_all(excess.names(self.entries()))
        return num_gone

    def _old(self, before_s: float, excess: Excess | None) -> Iterator[str]:
        """Yield the names of old entries, and note the others."""
        for blob in self.entries():
            if blob.changed_s < before_s:
                yield blob.name
            elif excess is not None:
                excess.note(blob)

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
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(path)

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        # file systems have errors of their own kinds: of credentials, of a protocol, of a codec
        except Exception as error:
            raise BlobStoreError(f"{self.url} {what}: {error}") from error


class BlobWriter:
    """Writes one entry piece by piece; it has no name before it is committed.

    A process that is killed in between leaves a part that a sweep deletes. Calls block; they may
    come from any thread. All but :meth:`discard` raise :class:`BlobStoreError`.
    """

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._fs = store._fs
        self._part = store._path(f"{secrets.token_hex(16)}{PART_SUFFIX}")
        self._file: Any = None
        self._is_over = False
        self._lock = threading.Lock()

    def write(self, data: bytes | bytearray) -> None:
        """Append a piece."""
        with self._lock, self._store._failing("did not take a new entry"):
            self._open().write(data)

    def commit(self, name: str) -> None:
        """Give what was written its name, at once."""
        path = self._store._path(name)
        with self._lock, self._store._failing("did not take a new entry"):
            file = self._open()
            if self._store._is_local:
                file.close()
                # once named, it is whole after a power failure, too
                if self._store._is_synced:
                    sync_file(self._part)
                self._fs.mv(self._part, path)
                self._store._sync_names()
            else:
                file.close()
                self._fs.cp_file(self._part, path)
                self._store._remove([self._part])
            self._is_over = True

    def discard(self) -> None:
        """Remove what was written, unless it is committed; what fails is left to a sweep."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            if self._file is None:
                return
            try:
                with self._store._failing("did not end a new entry"):
                    self._file.close()
                    self._store._remove([self._part])
            except BlobStoreError as error:
                logger.warning("%s is left to the sweep: %s", self._part, error)

    def _open(self) -> Any:
        if self._is_over:
            raise ValueError("the entry is committed or given up already")
        if self._file is None:
            self._file = self._fs.open(self._part, "wb", block_size=_BLOCK_BYTES)
        return self._file


def _open(url: str) -> tuple[Any, str]:
    """Return a URL's file system and the path in it."""
    # other processes write and delete, too: what was listed before says nothing
    options: dict[str, Any] = {"use_listings_cache": False}
    is_s3 = url.startswith(("s3://", "s3a://"))
    if is_s3:
        options |= s3_options()
    fs, root = fsspec.core.url_to_fs(url, **options)
    if is_s3:
        fs.retries = TRIES
    return fs, root


def _protocols(fs: Any) -> tuple[str, ...]:
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def _age(blob: Blob) -> tuple[float, str]:
    return blob.changed_s, blob.name


def _blob(row: dict[str, Any]) -> Blob:
    changed = row.get("mtime", row.get("LastModified", row.get("created", 0.0)))
    changed_s = changed.timestamp() if isinstance(changed, datetime) else float(changed)
    return Blob(row["name"].rpartition("/")[2], int(row["size"]), changed_s)
