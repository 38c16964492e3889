"""Types and their fields; unions of dataclasses, which msgspec cannot tell apart.

Each member of such a union travels with its class's name. A type that holds one has a twin for the
wire, in which the union is an envelope of name and plain values; any other type is its own twin,
and costs nothing.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import GenericAlias
from typing import Any, Literal, get_args, get_origin

import msgspec

_NONE = type(None)


@cache
def fields_of(cls: type) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields by name, in their order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the types that a union is made of; of any other type itself."""
    return get_args(kind) if _is_union(get_origin(kind)) else (kind,)


def described(kind: Any) -> str:
    """Return a type in words that differ whenever its values would be read differently."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        inside = ",".join(f"{name}:{described(one)}" for name, one in fields_of(kind).items())
        return f"{kind.__name__}({inside})"
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {sorted(map(repr, args))}"
    if args:
        inside = ",".join("..." if one is ... else described(one) for one in args)
        name = "union" if _is_union(origin) else "dict" if _is_mapping(origin) else origin.__name__
        return f"{name}[{inside}]"
    return "None" if kind is _NONE else getattr(kind, "__name__", repr(kind))


def _is_union(origin: Any) -> bool:
    return origin in (typing.Union, types.UnionType)


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """A member of a union: its class's name, and itself as plain values."""

    tag: str
    body: Any


Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Twin:
    """The type that stands for another one on the wire.

    Attributes:
        kind: a type that msgspec knows.
        pack: makes a value of it; None where the value itself is one.
        unpack: makes the original value again; None likewise.
    """

    kind: Any
    pack: Convert | None = None
    unpack: Convert | None = None


def twin_of(kind: Any) -> Twin:
    """Return the twin of a type.

    Args:
        kind: built of dataclasses, tuples, lists, mappings, unions and plain types.

    Raises:
        TypeError: there is a set in it, which has no order: the same value would have many forms.
    """
    members = members_of(kind)
    if sum(dataclasses.is_dataclass(one) for one in members) > 1:
        return _of_union([one for one in members if one is not _NONE], _NONE in members)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _of_dataclass(kind)
    args, origin = get_args(kind), get_origin(kind)
    if kind in (set, frozenset) or origin in (set, frozenset):
        raise TypeError(f"{kind} has no order; the codec takes a tuple")
    if not args or origin in (None, Literal):
        return Twin(kind)
    if len(members) > 1:
        return _of_optional(kind)
    if origin is tuple and args[-1] is not ...:
        return _of_fixed_tuple(kind)
    return _of_collection(kind)


def applied(convert: Convert | None, value: Any) -> Any:
    """Return a value as a twin's function converts it, if there is one."""
    return value if convert is None else convert(value)


def _of_union(members: list[Any], has_none: bool) -> Twin:
    twins = {one.__name__: twin_of(one) for one in members}
    # what has bytes keeps them: msgpack writes them as such
    to_plain = partial(msgspec.to_builtins, builtin_types=(bytes,))

    def pack(value: Any) -> Any:
        if value is None:
            return None
        name = type(value).__name__
        return Envelope(name, to_plain(applied(twins[name].pack, value)))

    def unpack(envelope: Any) -> Any:
        if envelope is None:
            return None
        if envelope.tag not in twins:
            raise msgspec.ValidationError(
                f"there is no {envelope.tag!r} here, but {', '.join(twins)}"
            )
        twin = twins[envelope.tag]
        return applied(twin.unpack, msgspec.convert(envelope.body, twin.kind))

    return Twin(Envelope | None if has_none else Envelope, pack, unpack)


def _of_dataclass(cls: type) -> Twin:
    twins = {name: twin_of(kind) for name, kind in fields_of(cls).items()}
    if all(twin.pack is None for twin in twins.values()):
        return Twin(cls)
    fields: list[Any] = [
        (field.name, twins[field.name].kind, _default_of(field, twins[field.name]))
        for field in dataclasses.fields(cls)
    ]
    wire: Any = dataclasses.make_dataclass(cls.__name__, fields)

    def pack(value: Any) -> Any:
        return wire(*(applied(twins[name].pack, getattr(value, name)) for name in twins))

    def unpack(value: Any) -> Any:
        return cls(*(applied(twins[name].unpack, getattr(value, name)) for name in twins))

    return Twin(wire, pack, unpack)


def _default_of(field: dataclasses.Field[Any], twin: Twin) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=field.default_factory)
    if field.default is dataclasses.MISSING:
        return dataclasses.field()
    return dataclasses.field(default=applied(twin.pack, field.default))


def _of_optional(kind: Any) -> Twin:
    """Return the twin of a union with at most one dataclass or collection in it."""
    for twin in map(twin_of, members_of(kind)):
        if twin.pack is not None and twin.unpack is not None:
            return Twin(twin.kind | None, _unless_none(twin.pack), _unless_none(twin.unpack))
    return Twin(kind)


def _unless_none(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


def _of_fixed_tuple(kind: Any) -> Twin:
    twins = [twin_of(one) for one in get_args(kind)]
    if all(twin.pack is None for twin in twins):
        return Twin(kind)
    return Twin(
        GenericAlias(tuple, tuple(twin.kind for twin in twins)),
        lambda value: tuple(applied(t.pack, one) for t, one in zip(twins, value, strict=True)),
        lambda value: tuple(applied(t.unpack, one) for t, one in zip(twins, value, strict=True)),
    )


def _of_collection(kind: Any) -> Twin:
    """Return the twin of a list, a mapping, or a tuple of any length."""
    origin, args = get_origin(kind), get_args(kind)
    is_mapping = _is_mapping(origin)
    twin = twin_of(args[1] if is_mapping else args[0])
    pack, unpack = twin.pack, twin.unpack
    if pack is None or unpack is None:
        return Twin(kind)
    if is_mapping:
        return Twin(
            GenericAlias(dict, (args[0], twin.kind)),
            lambda value: {name: pack(one) for name, one in value.items()},
            lambda value: {name: unpack(one) for name, one in value.items()},
        )
    return Twin(
        GenericAlias(origin, (twin.kind, *args[1:])),
        lambda value: origin(map(pack, value)),
        lambda value: origin(map(unpack, value)),
    )
