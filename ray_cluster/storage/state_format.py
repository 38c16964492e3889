"""How the bytes of a request's state begin: readable without torch, and without all of them."""

from __future__ import annotations

import json
import zlib
from typing import Any

_MAGIC = b"ray-cluster request state 3\n"
_CHECKSUM_BYTES = 4
_START = len(_MAGIC) + _CHECKSUM_BYTES
# more than a header with prompts of the usual bound takes
HEAD_BYTES = 1 << 16


def wrapped(body: bytes) -> bytes:
    """Return safetensors with a mark and a checksum before them."""
    return _MAGIC + zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body


def unwrapped(data: bytes) -> bytes:
    """Return the safetensors within, once nothing of them is missing or changed.

    Raises:
        ValueError: there is.
    """
    _check_mark(data)
    body = data[_START:]
    given = int.from_bytes(data[len(_MAGIC) : _START], "little")
    if len(data) < _START or zlib.crc32(body) != given:
        raise ValueError(f"request state is damaged: {len(data)} bytes with a wrong checksum")
    return body


def header_of(body: bytes) -> dict[str, Any]:
    """Return what safetensors, or their first bytes, say of the state beside its tensors."""
    length = int.from_bytes(body[:8], "little")
    state: dict[str, Any] = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["state"])
    return state


def steps_done_in(head: bytes) -> int:
    """Return how many steps are done of the state that begins so.

    Raises:
        ValueError: it is no state of this version, or its header is longer than that.
    """
    _check_mark(head)
    try:
        return int(header_of(head[_START:])["step_index"])
    except (LookupError, TypeError) as error:
        raise ValueError(f"not a request state of this version: {error!r}") from error


def _check_mark(data: bytes) -> None:
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(
            f"not a request state: {len(data)} bytes that do not begin with {_MAGIC!r}"
        )
