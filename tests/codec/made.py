"""Values of any type that the codec knows, made up from its annotations."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin

from ray_cluster.codec.unions import fields_of, members_of

_NONE = type(None)
_TRIES = 50


def made(kind: Any, rng: random.Random) -> Any:
    """Return a value of a type; no field has its default but by chance."""
    members = members_of(kind)
    if len(members) > 1:
        return made(rng.choice(members), rng)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _made_class(kind, rng)
    args, origin = get_args(kind), get_origin(kind)
    if origin is Literal:
        return rng.choice(args)
    if origin is not None:
        return _made_collection(origin, args, rng)
    return _made_plain(kind, rng)


def _made_class(kind: Any, rng: random.Random) -> Any:
    for _ in range(_TRIES):
        # some refuse numbers that are out of bounds
        with suppress(ValueError):
            return kind(**{name: made(one, rng) for name, one in fields_of(kind).items()})
    raise AssertionError(f"{kind.__name__} refuses every value")


def _made_collection(origin: Any, args: tuple[Any, ...], rng: random.Random) -> Any:
    if origin is tuple and args[-1:] != (...,):
        return tuple(made(one, rng) for one in args)
    count = rng.randint(1, 3)
    if issubclass(origin, Mapping):
        return {made(args[0], rng): made(args[1], rng) for _ in range(count)}
    return origin(made(args[0], rng) for _ in range(count))


def _made_plain(kind: Any, rng: random.Random) -> Any:
    if kind is _NONE:
        return None
    plain = {
        bool: rng.random() < 0.5,
        int: rng.randrange(-(2**53), 2**53),
        float: rng.uniform(-1e6, 1e6),
        str: "".join(rng.choices('abcöß漢 \n"\\', k=8)),
        bytes: rng.randbytes(8),
    }
    return plain[kind]


def leaves(value: Any) -> Iterator[Any]:
    """Yield the type of everything within a value and what it is, whatever ``==`` looks at."""
    yield type(value)
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield field.name
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from (repr(key), *leaves(value[key]))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from leaves(one)
    else:
        yield value
