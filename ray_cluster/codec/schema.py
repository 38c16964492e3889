"""What a type says of its values: its fields, by name and type, and which it does not know."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

_NONE = type(None)


def fields_of(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name, in their order."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the types that a union is made of; of any other type itself."""
    if get_origin(kind) in (typing.Union, types.UnionType):
        return get_args(kind)
    return (kind,)


def is_tagged(kind: Any) -> bool:
    """Whether values of a type say which member of a union they are."""
    return sum(dataclasses.is_dataclass(one) for one in members_of(kind)) > 1


def described(kind: Any) -> str:
    """Return a type in words that differ whenever its values would be read differently."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        inside = ",".join(f"{name}:{described(one)}" for name, one in fields_of(kind).items())
        return f"{kind.__name__}({inside})"
    if get_origin(kind) is Literal:
        return f"one of {sorted(map(repr, get_args(kind)))}"
    if args := get_args(kind):
        inside = ",".join("..." if one is ... else described(one) for one in args)
        return f"{_plain(get_origin(kind))}[{inside}]"
    return "None" if kind is _NONE else getattr(kind, "__name__", repr(kind))


def _plain(origin: Any) -> str:
    if origin in (typing.Union, types.UnionType):
        return "union"
    return "dict" if _is_mapping(origin) else str(origin.__name__)


def unknown_fields(kind: Any, value: Any, where: str = "") -> list[str]:
    """Return the paths of fields that a type does not have.

    Args:
        kind: a type.
        value: of it, as plain lists, mappings, numbers and texts.
        where: path of the value.
    """
    if value is None:
        return []
    members = [one for one in members_of(kind) if one is not _NONE]
    if is_tagged(kind):
        tag, body = value
        known = [one for one in members if getattr(one, "__name__", "") == tag]
        return unknown_fields(known[0], body, f"{where}.{tag}") if known else [f"{where}.{tag}"]
    return [name for one in members for name in _unknown_of(one, value, where)]


def _unknown_of(kind: Any, value: Any, where: str) -> list[str]:
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _unknown_of_dataclass(kind, value, where)
    args, origin = get_args(kind), get_origin(kind)
    if origin is tuple and args[-1:] != (...,):
        pairs = [*zip(args, value, strict=True)] if isinstance(value, list | tuple) else []
    elif _is_mapping(origin):
        pairs = [(args[1], one) for one in value.values()]
    elif origin in (tuple, list):
        pairs = [(args[0], one) for one in value]
    else:
        pairs = []
    return [name for one, item in pairs for name in unknown_fields(one, item, where)]


def _unknown_of_dataclass(cls: type, value: Any, where: str) -> list[str]:
    if not isinstance(value, Mapping):
        return []
    known, here = fields_of(cls), f"{where}.{cls.__name__}" if where else cls.__name__
    found = [f"{here}.{name}" for name in value if name not in known]
    for name, kind in known.items():
        if name in value:
            found += unknown_fields(kind, value[name], f"{here}.{name}")
    return found


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)
