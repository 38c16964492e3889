"""What processes may call in each other: interfaces whose methods declare all that travels.

An interface is a ``Protocol`` class of coroutine methods. Their annotations are what the codec
reads and writes; :func:`raises` names the errors that a caller gets as such. One that is a long
poll has a last parameter ``wait_s``: how long its caller is ready to have it held.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import GenericAlias
from typing import Any, TypeVar

from ray_cluster.codec.values import Codec
from ray_cluster.errors import RayClusterError

F = TypeVar("F", bound=Callable[..., Any])

_ERRORS = "_errors"
_WAIT = "wait_s"


def raises(*errors: type[RayClusterError]) -> Callable[[F], F]:
    """Declare the errors that a method may raise for its caller."""

    def mark(method: F) -> F:
        setattr(method, _ERRORS, errors)
        return method

    return mark


@dataclass(frozen=True, slots=True)
class RaisedError:
    """An error as it travels: which one of those declared, and what it was made with."""

    name: str
    arguments: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Method:
    """One method of an interface.

    Attributes:
        parameters: names, in their order.
        defaults: of the last parameters.
        errors: those declared, by name.
    """

    name: str
    parameters: tuple[str, ...]
    defaults: tuple[Any, ...]
    arguments: Codec[tuple[Any, ...]]
    result: Codec[Any]
    errors: dict[str, type[RayClusterError]]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return what each parameter is, in their order."""
        named = dict(zip(self.parameters, args, strict=False)) | kwargs
        num_required = len(self.parameters) - len(self.defaults)
        values = dict(zip(self.parameters[num_required:], self.defaults, strict=True)) | named
        if len(args) > len(self.parameters) or set(values) != set(self.parameters):
            raise TypeError(f"{self.name} takes {', '.join(self.parameters)}; given {named}")
        return tuple(values[name] for name in self.parameters)

    def held_s(self, args: tuple[Any, ...]) -> float:
        """Return for how long the call may be held; 0 for one that is answered at once."""
        return float(args[-1]) if self.parameters[-1:] == (_WAIT,) else 0.0


@cache
def methods_of(interface: type) -> Mapping[str, Method]:
    """Return the methods of an interface by name; once a process, as codecs take a while."""
    names = [name for name in dir(interface) if not name.startswith("_")]
    functions = {name: getattr(interface, name) for name in names}
    return {
        name: _method(function)
        for name, function in functions.items()
        if inspect.iscoroutinefunction(function)
    }


def _method(function: Callable[..., Any]) -> Method:
    hints = typing.get_type_hints(function)
    parameters = [*inspect.signature(function).parameters.values()][1:]
    kinds = tuple(hints[one.name] for one in parameters)
    return Method(
        name=function.__name__,
        parameters=tuple(one.name for one in parameters),
        defaults=tuple(one.default for one in parameters if one.default is not one.empty),
        arguments=Codec(GenericAlias(tuple, kinds)),
        result=Codec(hints["return"]),
        errors={error.__name__: error for error in getattr(function, _ERRORS, ())},
    )


Call = Callable[[Method, tuple[Any, ...]], Awaitable[Any]]
"""Calls a method elsewhere with its arguments, and returns what it returns."""


def stub(interface: type, call: Call) -> Any:
    """Return an object with an interface's methods, each of which is called elsewhere."""

    def remote(method: Method) -> Callable[..., Awaitable[Any]]:
        async def run(_self: object, *args: Any, **kwargs: Any) -> Any:
            return await call(method, method.bound(args, kwargs))

        return run

    members = {name: remote(method) for name, method in methods_of(interface).items()}
    return type(f"Remote{interface.__name__}", (), members)()
