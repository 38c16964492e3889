"""Unions of dataclasses, which msgspec cannot tell apart: each member travels with its name.

A type that holds such a union has a twin for the wire, in which the union is an envelope of name
and bytes; a type that holds none is its own twin, and costs nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import GenericAlias
from typing import Any, get_args, get_origin

import msgspec

from ray_cluster.codec.schema import fields_of, is_tagged, members_of

Convert = Callable[[Any], Any]


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A member of a union: its class's name, and itself as bytes."""

    tag: str
    body: msgspec.Raw


class PlainEnvelope(msgspec.Struct, array_like=True, frozen=True):
    """A member of a union: its class's name, and itself as plain values."""

    tag: str
    body: Any


@dataclass(frozen=True, slots=True)
class Form:
    """What is inside envelopes.

    Attributes:
        envelope: its type.
        pack: makes the body of a member's twin.
        reader: for a twin's type, what makes such a value of a body.
    """

    envelope: type
    pack: Convert
    reader: Callable[[Any], Convert]


def _packed_reader(kind: Any) -> Convert:
    return msgspec.msgpack.Decoder(kind).decode


def _plain_reader(kind: Any) -> Convert:
    return lambda body: msgspec.convert(body, kind)


_ENCODER = msgspec.msgpack.Encoder()
PACKED = Form(Envelope, lambda value: msgspec.Raw(_ENCODER.encode(value)), _packed_reader)
PLAIN = Form(PlainEnvelope, msgspec.to_builtins, _plain_reader)


@dataclass(frozen=True, slots=True)
class Twin:
    """What stands for a type on the wire.

    Attributes:
        kind: a type that msgspec knows.
        pack: makes a value of it; None where the value itself is one.
        unpack: makes the value again.
    """

    kind: Any
    pack: Convert | None = None
    unpack: Convert | None = None


def twin_of(kind: Any, form: Form) -> Twin:
    """Return the twin of a type.

    Args:
        kind: built of dataclasses, tuples, lists, mappings, unions and plain types.
        form: of what is inside envelopes.

    Raises:
        TypeError: there is a set in it, which has no order: the same value would have many forms.
    """
    if is_tagged(kind):
        return _tagged(kind, form)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _of_dataclass(kind, form)
    args, origin = get_args(kind), get_origin(kind)
    if kind in (set, frozenset) or origin in (set, frozenset):
        raise TypeError(f"{kind} has no order; the codec takes a tuple")
    if not args or origin is None:
        return Twin(kind)
    if len(members_of(kind)) > 1:
        return _optional(kind, form)
    if origin is tuple and args[-1] is not ...:
        return _of_fixed_tuple(kind, form)
    if origin is tuple or origin is list:
        return _of_items(kind, form)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _of_mapping(kind, form)
    return Twin(kind)


def _tagged(kind: Any, form: Form) -> Twin:
    members = [one for one in members_of(kind) if one is not type(None)]
    twins = {one.__name__: twin_of(one, form) for one in members}
    readers = {name: form.reader(twin.kind) for name, twin in twins.items()}

    def pack(value: Any) -> Any:
        if value is None:
            return None
        name = type(value).__name__
        return form.envelope(name, form.pack(_applied(twins[name].pack, value)))

    def unpack(envelope: Any) -> Any:
        if envelope is None:
            return None
        if envelope.tag not in twins:
            raise msgspec.ValidationError(
                f"there is no {envelope.tag!r} here, but {', '.join(twins)}"
            )
        return _applied(twins[envelope.tag].unpack, readers[envelope.tag](envelope.body))

    wire: Any = form.envelope
    return Twin(wire | None if type(None) in members_of(kind) else wire, pack, unpack)


def _applied(convert: Convert | None, value: Any) -> Any:
    return value if convert is None else convert(value)


def _of_dataclass(cls: type, form: Form) -> Twin:
    twins = {name: twin_of(kind, form) for name, kind in fields_of(cls).items()}
    if all(twin.pack is None for twin in twins.values()):
        return Twin(cls)
    fields: list[Any] = [
        (field.name, twins[field.name].kind, _default_of(field))
        for field in dataclasses.fields(cls)
    ]
    twin: Any = dataclasses.make_dataclass(cls.__name__, fields)

    def pack(value: Any) -> Any:
        return twin(*(_applied(twins[name].pack, getattr(value, name)) for name in twins))

    def unpack(value: Any) -> Any:
        return cls(*(_applied(twins[name].unpack, getattr(value, name)) for name in twins))

    return Twin(twin, pack, unpack)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    return dataclasses.field(default=field.default)


def _optional(kind: Any, form: Form) -> Twin:
    """Return the twin of a union with at most one dataclass or collection in it."""
    twins = [twin_of(one, form) for one in members_of(kind)]
    packs = [twin for twin in twins if twin.pack is not None]
    if not packs:
        return Twin(kind)
    (twin,) = packs
    pack, unpack = twin.pack, twin.unpack
    assert pack is not None
    assert unpack is not None
    return Twin(
        twin.kind | None,
        lambda value: None if value is None else pack(value),
        lambda value: None if value is None else unpack(value),
    )


def _of_fixed_tuple(kind: Any, form: Form) -> Twin:
    twins = [twin_of(one, form) for one in get_args(kind)]
    if all(twin.pack is None for twin in twins):
        return Twin(kind)
    return Twin(
        GenericAlias(tuple, tuple(twin.kind for twin in twins)),
        lambda value: tuple(_applied(t.pack, one) for t, one in zip(twins, value, strict=True)),
        lambda value: tuple(_applied(t.unpack, one) for t, one in zip(twins, value, strict=True)),
    )


def _of_items(kind: Any, form: Form) -> Twin:
    twin, origin = twin_of(get_args(kind)[0], form), get_origin(kind)
    pack, unpack = twin.pack, twin.unpack
    if pack is None or unpack is None:
        return Twin(kind)
    items = (twin.kind,) if origin is list else (twin.kind, ...)
    return Twin(
        GenericAlias(origin, items),
        lambda value: origin(map(pack, value)),
        lambda value: origin(map(unpack, value)),
    )


def _of_mapping(kind: Any, form: Form) -> Twin:
    key, value_kind = get_args(kind)
    twin = twin_of(value_kind, form)
    pack, unpack = twin.pack, twin.unpack
    if pack is None or unpack is None:
        return Twin(kind)
    return Twin(
        GenericAlias(dict, (key, twin.kind)),
        lambda value: {name: pack(one) for name, one in value.items()},
        lambda value: {name: unpack(one) for name, one in value.items()},
    )
