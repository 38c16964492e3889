"""What a type says of its values: its fields, by name and type, and which it does not know."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Literal, get_args, get_origin

_NONE = type(None)


@cache
def fields_of(cls: type) -> Mapping[str, Any]:
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


Check = Callable[[Any, str], list[str]]
"""From plain lists, mappings, numbers and texts, and their path, to the paths of unknown fields."""


def unknown_fields(kind: Any, value: Any) -> list[str]:
    """Return the paths of fields that a type does not have.

    Args:
        value: of the type, as plain lists, mappings, numbers and texts.
    """
    check = _check_of(kind)
    return [] if check is None else check(value, "")


@cache
def _check_of(kind: Any) -> Check | None:
    """Return what finds unknown fields in values of a type; None if there can be none."""
    if is_tagged(kind):
        return _check_of_union(kind)
    members = [one for one in members_of(kind) if one is not _NONE]
    if len(members) > 1:
        # at most one of them is a dataclass or a collection
        return next((one for one in map(_check_of, members) if one is not None), None)
    (one,) = members or (_NONE,)
    if dataclasses.is_dataclass(one) and isinstance(one, type):
        return _check_of_dataclass(one)
    args, origin = get_args(one), get_origin(one)
    if origin is tuple and args[-1:] != (...,):
        return _check_of_fixed_tuple(args)
    if _is_mapping(origin):
        return _check_of_items(_check_of(args[1]), lambda value: value.values())
    return _check_of_items(_check_of(args[0]), iter) if origin in (tuple, list) else None


def _check_of_dataclass(cls: type) -> Check:
    known = fields_of(cls)
    inner = {name: one for name, kind in known.items() if (one := _check_of(kind)) is not None}

    def check(value: Any, where: str) -> list[str]:
        if not isinstance(value, Mapping):
            return []
        here = f"{where}.{cls.__name__}" if where else cls.__name__
        found = [f"{here}.{name}" for name in value if name not in known]
        for name, one in inner.items():
            if value.get(name) is not None:
                found += one(value[name], f"{here}.{name}")
        return found

    return check


def _check_of_union(kind: Any) -> Check:
    checks = {one.__name__: _check_of(one) for one in members_of(kind) if one is not _NONE}

    def check(value: Any, where: str) -> list[str]:
        tag, body = value
        if tag not in checks:
            return [f"{where}.{tag}"]
        inner = checks[tag]
        return [] if inner is None else inner(body, f"{where}.{tag}")

    return check


def _check_of_fixed_tuple(kinds: tuple[Any, ...]) -> Check | None:
    inner = [(place, one) for place, kind in enumerate(kinds) if (one := _check_of(kind))]
    if not inner:
        return None
    return lambda value, where: [
        name
        for place, one in inner
        if value[place] is not None
        for name in one(value[place], where)
    ]


def _check_of_items(inner: Check | None, items: Callable[[Any], Iterable[Any]]) -> Check | None:
    if inner is None:
        return None
    return lambda value, where: [
        name for one in items(value) if one is not None for name in inner(one, where)
    ]


def _is_mapping(origin: Any) -> bool:
    return isinstance(origin, type) and issubclass(origin, Mapping)
