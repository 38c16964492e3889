"""Dataclasses as bytes: msgpack between processes, JSON where people may want to read it.

Both are versioned, and refuse fields that the type does not have. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast

import msgspec

from ray_cluster.codec.unions import applied, described, twin_of

T = TypeVar("T")

VERSION = 1
_HEAD_BYTES = 5
_ENCODER = msgspec.msgpack.Encoder()


class CodecError(ValueError):
    """Bytes that are no value of the type, or of another version."""


class Codec(Generic[T]):
    """Writes and reads values of one type as msgpack, for other processes of the cell.

    The bytes begin with the version and a checksum of the type's fields. If the other side's type
    differs, fields that it lacks take their defaults, and fields that are unknown here are an
    error.

    Attributes:
        kind: the type: built of dataclasses, tuples, lists, mappings, unions and plain types.
    """

    def __init__(self, kind: Any) -> None:
        self.kind = kind
        self._twin = twin_of(kind)
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(self._twin.kind)
        checksum = zlib.crc32(described(kind).encode())
        self._head = bytes([VERSION]) + checksum.to_bytes(_HEAD_BYTES - 1, "big")

    def encode(self, value: T) -> bytes:
        """Return a value as bytes."""
        return self._head + _ENCODER.encode(applied(self._twin.pack, value))

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
            value = applied(self._twin.unpack, self._decoder.decode(body))
            if data[:_HEAD_BYTES] != self._head:
                given = msgspec.msgpack.decode(body)
                _refuse_unknown(given, applied(self._twin.pack, value))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise _no_value(self.kind, error) from error
        return cast(T, value)


class TextCodec(Generic[T]):
    """Writes and reads values of one type as JSON, for stores that outlive versions.

    Args:
        kind: as :class:`Codec` takes it, with texts for keys of mappings.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind
        self._twin = twin_of(kind)

    def encode(self, value: T) -> str:
        """Return a value as a text."""
        plain = msgspec.to_builtins(applied(self._twin.pack, value))
        # Python's JSON knows infinity and what is not a number
        return json.dumps({"version": VERSION, "value": plain})

    def decode(self, text: str | bytes) -> T:
        """Return the value that a text stands for; raises :class:`CodecError` if for none."""
        outer = plain_of(text)
        if not is_versioned(outer):
            raise CodecError(
                f"{described(self._kind)[:100]} of version {VERSION} expected; given {text[:60]!r}"
            )
        return self.of_plain(outer["value"])

    def of_plain(self, plain: Any) -> T:
        """Return the value that plain lists, mappings, numbers and texts stand for.

        Raises:
            CodecError: they stand for none.
        """
        try:
            value = applied(self._twin.unpack, msgspec.convert(plain, self._twin.kind))
            _refuse_unknown(plain, msgspec.to_builtins(applied(self._twin.pack, value)))
        except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
            raise _no_value(self._kind, error) from error
        return cast(T, value)


def plain_of(text: str | bytes) -> Any:
    """Return the plain lists, mappings, numbers and texts of JSON; CodecError if it is none."""
    try:
        return json.loads(text)
    except (RecursionError, TypeError, ValueError) as error:
        raise CodecError(f"not JSON: {error}") from error


def is_versioned(plain: Any) -> bool:
    """Whether plain values are what a :class:`TextCodec` of this version has written."""
    return (
        isinstance(plain, dict)
        and plain.keys() == {"version", "value"}
        and (plain["version"] == VERSION)
    )


def _refuse_unknown(given: Any, again: Any) -> None:
    """Raise ValueError for given fields that are gone once the value is written again."""
    data = _ENCODER.encode(again)
    if _ENCODER.encode(given) == data:
        return
    if unknown := list(_unknown(given, msgspec.msgpack.decode(data), "")):
        raise ValueError(f"unknown fields: {', '.join(unknown[:5])}")


def _unknown(given: Any, known: Any, where: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            here = f"{where}.{name}" if where else str(name)
            if name in known:
                yield from _unknown(value, known[name], here)
            else:
                yield here
    elif isinstance(given, list) and isinstance(known, list):
        for index, (value, other) in enumerate(zip(given, known, strict=False)):
            yield from _unknown(value, other, f"{where}[{index}]")


def _no_value(kind: Any, error: Exception) -> CodecError:
    # a class by its name, other types as the checksum spells them
    name = kind.__name__ if isinstance(kind, type) else described(kind)[:100]
    return CodecError(f"no value of {name}: {error}")
