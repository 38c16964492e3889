"""The reference of all keys of the configuration, from the classes that validate it."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.section import Applied, Section, applied, section_in

# how bounds are written
_BOUNDS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "min_length": "{} or more",
}
_TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false"}


_HEAD = "| key | default | allowed | applied | what it is |\n|---|---|---|---|---|"
_APPLIED: dict[Applied, str] = {
    "live": "live",
    "redeploy": "redeploy",
    # a change of one starts or stops processes
    "count": "redeploy, nothing replaced",
}


def reference() -> str:
    """Return the reference as Markdown: a table of keys for each section."""
    return "\n".join(_sections(ClusterConfig, ""))


def _sections(kind: type[Section], path: str, mark: Applied | None = None) -> Iterator[str]:
    """Yield the text of a section, and of those within it.

    Args:
        mark: of the key that holds the section, in another one.
    """
    fields = kind.model_fields
    rows = [
        f"| `{name}` | {_default(field)} | {_allowed(field)} "
        f"| {_APPLIED[mark or applied(kind, name)]} | {field.description or ''} |"
        for name, field in fields.items()
        if section_in(field.annotation) is None
    ]
    if rows:
        text = " ".join((kind.__doc__ or "").split()).replace("``", "`")
        yield "\n".join([f"## `{path}`", "", text, "", _HEAD, *rows, ""])
    for name, field in fields.items():
        inner = section_in(field.annotation)
        if inner is not None:
            many = "[]" if get_origin(field.annotation) is tuple else ""
            place = f"{path}.{name}{many}".removeprefix(".")
            # what a key holds is applied as the key is
            yield from _sections(inner, place, mark or (applied(kind, name) if path else None))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    if field.default is None:
        return "`null`"
    if field.default == ():
        return "empty"
    if isinstance(field.default, tuple):
        return ", ".join(f"`{one}`" for one in field.default)
    if isinstance(field.default, bool):
        return f"`{str(field.default).lower()}`"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def _allowed(field: FieldInfo) -> str:
    kinds = _kinds(field.annotation)
    bounds = [
        text.format(f"{getattr(rule, name):g}")
        for rule in field.metadata
        for name, text in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    patterns = [f"`{rule.pattern}`" for rule in field.metadata if getattr(rule, "pattern", None)]
    return ", ".join([*kinds, *bounds, *patterns])


def _kinds(annotation: Any) -> list[str]:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return [", ".join(f"`{one}`" for one in args)]
    if origin in (Union, UnionType):
        return [kind for one in args if one is not NoneType for kind in _kinds(one)]
    if origin is tuple:
        if Ellipsis in args:
            return ["list"]
        return [f"list of {len(args)} {_kinds(args[0])[0]}s"]
    return ["text" if annotation is SecretStr else _TYPES[annotation]]
