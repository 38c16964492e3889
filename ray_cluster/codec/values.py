"""Dataclasses as bytes: msgpack between processes, JSON where somebody may want to read it.

Both are versioned, and know no field that the type does not have. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, Generic, TypeVar, cast

import msgspec

from ray_cluster.codec.schema import described, unknown_fields
from ray_cluster.codec.unions import PACKED, PLAIN, twin_of

T = TypeVar("T")

VERSION = 1
_HEAD_BYTES = 5


class CodecError(ValueError):
    """Bytes that are no value of the type, or of another version."""


class Codec(Generic[T]):
    """Writes and reads values of one type as msgpack, for other processes of the cell.

    The bytes begin with the version and a checksum of the type's fields. Where the other side's
    type is another one, fields that it lacks take their defaults, and fields that are not known
    here are an error.

    Attributes:
        kind: the type: built of dataclasses, tuples, lists, mappings, unions and plain types.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self._twin = twin_of(kind, PACKED)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(self._twin.kind)
        checksum = zlib.crc32(described(kind).encode())
        self._head = bytes([VERSION]) + checksum.to_bytes(_HEAD_BYTES - 1, "big")

    def encode(self, value: T) -> bytes:
        """Return a value as bytes."""
        packed = value if self._twin.pack is None else self._twin.pack(value)
        return self._head + self._encoder.encode(packed)

    def decode(self, data: bytes) -> T:
        """Return the value that bytes stand for.

        Raises:
            CodecError: they stand for none.
        """
        if data[:1] != self._head[:1]:
            raise CodecError(
                f"{described(self.kind)[:100]} of version {VERSION} expected; the bytes begin "
                f"with {data[:_HEAD_BYTES]!r}: all processes of a cell run one version"
            )
        body = memoryview(data)[_HEAD_BYTES:]
        try:
            if data[:_HEAD_BYTES] != self._head:
                _check(self.kind, msgspec.msgpack.decode(body))
            found = self._decoder.decode(body)
            return cast(T, found if self._twin.unpack is None else self._twin.unpack(found))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise _no_value(self.kind, error) from error


class TextCodec(Generic[T]):
    """Writes and reads values of one type as JSON, for stores that outlive versions.

    Args:
        kind: as :class:`Codec` takes it, with texts for keys of mappings.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._twin = twin_of(kind, PLAIN)

    def encode(self, value: T) -> str:
        """Return a value as a text."""
        packed = value if self._twin.pack is None else self._twin.pack(value)
        # Python's JSON knows infinity and what is not a number
        return json.dumps({"version": VERSION, "value": msgspec.to_builtins(packed)})

    def decode(self, text: str | bytes) -> T:
        """Return the value that a text stands for.

        Raises:
            CodecError: it stands for none.
        """
        outer = plain_of(text)
        if not is_versioned(outer):
            raise CodecError(
                f"{described(self._kind)[:100]} of version {VERSION} expected; given {text[:60]!r}"
            )
        return self.of_plain(outer["value"])

    def of_plain(self, value: Any) -> T:
        """Return the value that plain lists, mappings, numbers and texts stand for.

        Raises:
            CodecError: they stand for none.
        """
        try:
            _check(self._kind, value)
            found = msgspec.convert(value, self._twin.kind)
            return cast(T, found if self._twin.unpack is None else self._twin.unpack(found))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise _no_value(self._kind, error) from error


def plain_of(text: str | bytes) -> Any:
    """Return the plain lists, mappings, numbers and texts of JSON.

    Raises:
        CodecError: it is no JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise CodecError(f"not JSON: {error}") from error


def is_versioned(plain: Any) -> bool:
    """Whether plain values are what a :class:`TextCodec` of this version has written."""
    return (
        isinstance(plain, dict)
        and plain.keys() == {"version", "value"}
        and (plain["version"] == VERSION)
    )


def _check(kind: Any, value: Any) -> None:
    if unknown := unknown_fields(kind, value):
        raise CodecError(f"unknown fields: {', '.join(unknown[:5])}")


def _no_value(kind: Any, error: Exception) -> CodecError:
    return CodecError(f"no value of {described(kind)[:100]}: {error}")
