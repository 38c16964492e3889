"""The reference of all keys of the configuration, from the classes that validate it."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.cascades import DiscriminatorArguments
from ray_cluster.config.sections.cell_wide import (
    DispatchArguments,
    LogsConfig,
    RayConfig,
    StorageArguments,
)
from ray_cluster.config.sections.controller import ControlArguments
from ray_cluster.config.sections.controlnets import ControlNetArguments
from ray_cluster.config.sections.http import HttpArguments
from ray_cluster.config.sections.loras import LoraArguments
from ray_cluster.config.sections.pools import PoolArguments
from ray_cluster.config.sections.preprocessors import PreprocessorsConfig
from ray_cluster.config.validation_errors import section_in

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
# what processes are started with; everything else is a setting
_ARGUMENTS = (
    *(HttpArguments, DispatchArguments, StorageArguments, PoolArguments, DiscriminatorArguments),
    *(LoraArguments, ControlNetArguments, ControlArguments, PreprocessorsConfig),
    *(LogsConfig, RayConfig),
)
# beside the arguments: a change of one starts or stops processes, and replaces none
_COUNTS = {"num_gateways", "num_stores", "replicas"}


def reference() -> str:
    """Return the reference as Markdown: a table of keys for each section."""
    return "\n".join(_sections(ClusterConfig, ""))


def _sections(kind: type[BaseModel], path: str) -> Iterator[str]:
    """Yield the text of a section, and of those within it."""
    fields = kind.model_fields
    rows = [
        f"| `{name}` | {_default(field)} | {_allowed(field)} | {_applied(kind, name)} "
        f"| {field.description or ''} |"
        for name, field in fields.items()
        if section_in(field.annotation) is None
    ]
    if rows:
        text = " ".join((kind.__doc__ or "").split()).replace("``", "`")
        yield "\n".join([f"## `{path}`", "", text, "", _HEAD, *rows, ""])
    for name, field in fields.items():
        inner = section_in(field.annotation)
        if inner is not None:
            mark = "[]" if get_origin(field.annotation) is tuple else ""
            yield from _sections(inner, f"{path}.{name}{mark}".removeprefix("."))


def _applied(kind: type[BaseModel], name: str) -> str:
    """Return how a change of a key reaches a running service."""
    if name in _COUNTS:
        return "redeploy, nothing replaced"
    is_argument = any(issubclass(kind, one) and name in one.model_fields for one in _ARGUMENTS)
    return "redeploy" if is_argument else "live"


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
