"""Named bytes in a folder or an object store: finished images, and states to go on from."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fsspec

from ray_cluster.errors import RayClusterError

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,199}")
_PART = ".part"
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

    def get(self, name: str) -> bytes | None:
        """Return the bytes under a name; None if there is no such entry."""
        path = self._path(name)
        try:
            return bytes(self._fs.cat_file(path))
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

    def entries(self) -> list[Blob]:
        """Return all entries, the one that was changed longest ago first."""
        try:
            self._fs.invalidate_cache(self._root)
            rows = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        except _FAILURES as error:
            raise BlobStoreError(f"{self.url} does not list its entries: {error}") from error
        blobs = [_blob(row) for row in rows if row["type"] == "file"]
        return sorted(blobs, key=lambda blob: (blob.changed_s, blob.name))

    def sweep(self, *, before_s: float, max_bytes: int | None = None) -> list[str]:
        """Remove entries older than an instant, then the oldest ones above a size.

        Args:
            before_s: Unix time; also ends what a killed process had begun to write before.
            max_bytes: what all entries together may take; None for no bound.

        Returns:
            The removed names.
        """
        blobs = self.entries()
        excess = 0 if max_bytes is None else sum(blob.num_bytes for blob in blobs) - max_bytes
        gone = []
        for blob in blobs:
            if blob.changed_s >= before_s and excess <= 0:
                break
            excess -= blob.num_bytes
            gone.append(blob.name)
        self.delete(gone)
        return gone

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


def _blob(row: dict[str, Any]) -> Blob:
    changed = row.get("mtime", row.get("LastModified", row.get("created", 0.0)))
    changed_s = changed.timestamp() if isinstance(changed, datetime) else float(changed)
    return Blob(row["name"].rpartition("/")[2], int(row["size"]), changed_s)
