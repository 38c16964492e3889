"""The codec on types of its own: what comes back, what is refused, and by which words."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import pytest

from ray_cluster.codec.unions import described
from ray_cluster.codec.values import Codec, CodecError, TextCodec
from tests.codec.made import leaves, made


@dataclass(frozen=True, slots=True)
class Made:
    data: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    reason: str = "none"


@dataclass(frozen=True, slots=True)
class Report:
    ends: tuple[Made | Lost, ...]
    last: Made | Lost | None = None
    by_name: Mapping[str, Made | Lost] = field(default_factory=dict)
    hidden: str = field(default="", compare=False)
    pair: tuple[int, Made | Lost] = (0, Lost())
    kind: Literal["a", "b"] = "a"
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Outer:
    report: Report | None
    reports: list[Report]
    names: tuple[str, ...] = ()


@pytest.mark.parametrize("codec", [Codec[Outer](Outer), TextCodec[Outer](Outer)])
def test_every_field_comes_back_even_those_that_equality_ignores(codec: Any) -> None:
    rng = random.Random(0)
    for _ in range(20):
        value = made(Outer, rng)
        data = codec.encode(value)
        found = codec.decode(data)
        assert list(leaves(found)) == list(leaves(value))
        assert codec.encode(found) == data


@pytest.mark.parametrize("codec", [Codec[Report](Report), TextCodec[Report](Report)])
@pytest.mark.parametrize("share", [math.inf, -math.inf, math.nan, 5e-324, 1e308, -0.0])
def test_every_float_comes_back(codec: Any, share: float) -> None:
    found = codec.decode(codec.encode(Report((), share=share))).share
    assert struct.pack("d", found) == struct.pack("d", share)


def test_leaves_differ_where_only_a_hidden_field_does() -> None:
    one, other = Report((), hidden="x"), Report((), hidden="y")
    assert one == other
    assert list(leaves(one)) != list(leaves(other))


def test_fields_that_another_version_lacks_take_their_defaults() -> None:
    older = Codec[Any](dict[str, int])
    newer = Codec[Lost](Lost)
    assert newer.decode(older.encode({})) == Lost("none")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"ends": [], "colour": 1}, "unknown fields: colour"),
        ({"ends": [["Lost", {"colour": 1}]]}, r"unknown fields: ends\[0\]\[1\].colour"),
        ({"ends": [["Gone", {}]]}, "there is no 'Gone' here, but Made, Lost"),
        ({"ends": [], "kind": "c"}, "Invalid enum value 'c'"),
        ({"ends": [], "share": "x"}, "Expected `float`"),
        ({}, "missing required field `ends`"),
    ],
)
def test_what_is_no_value_of_the_type_is_refused_by_name(value: Any, said: str) -> None:
    text = msgspec.json.encode({"version": 1, "value": value})
    with pytest.raises(CodecError, match=said):
        TextCodec[Report](Report).decode(text)
    with pytest.raises(CodecError, match=said):
        Codec[Report](Report).decode(Codec[Any](Any).encode(value))


@pytest.mark.parametrize("data", [b"", b"\1", b"\1abc", b"\2abcd", b"\1abcd\xc1", b"\x80\x04]"])
def test_bytes_that_are_nothing_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        Codec[Report](Report).decode(data)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2, "value": {}}', "null"])
def test_texts_that_are_nothing_are_refused(text: str) -> None:
    with pytest.raises(CodecError):
        TextCodec[Report](Report).decode(text)


@pytest.mark.parametrize("kind", [set, frozenset[int], tuple[int, frozenset[str]]])
def test_sets_are_refused_for_they_have_no_order(kind: Any) -> None:
    with pytest.raises(TypeError, match="takes a tuple"):
        Codec(kind)


def test_the_words_for_a_type_tell_fields_types_and_members() -> None:
    words = described(Outer)
    for part in ("hidden:str", "Made(data:bytes)", "one of", "tuple[str,...]", "dict[str,"):
        assert part in words
