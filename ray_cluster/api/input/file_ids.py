"""Ids of uploaded files: made of a file's digest and size, so that nothing has to be remembered."""

from __future__ import annotations

import re

from ray_cluster.requests import BlobRef

FILE_PREFIX = "file-"
_FILE_ID = re.compile(FILE_PREFIX + r"([0-9a-f]{64})-([1-9][0-9]{0,14})")
ID_PATTERN = f"^{_FILE_ID.pattern}$"


def file_id_of(ref: BlobRef) -> str:
    """Return the id of a file; only whoever has its bytes can know it."""
    return f"{FILE_PREFIX}{ref.sha256}-{ref.num_bytes}"


def file_of_id(file_id: str) -> BlobRef | None:
    """Return the file that an id names; None for what is no id."""
    found = _FILE_ID.fullmatch(file_id)
    return None if found is None else BlobRef(found[1], int(found[2]))
