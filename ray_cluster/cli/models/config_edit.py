"""Puts a pool's fidelity table into a configuration file, and leaves the rest as it is written."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import indent
from typing import Any

import yaml

from ray_cluster.errors import ConfigError

_KEY = "fidelity"


def with_fidelity(text: str, pool: str, table: Mapping[str, Any]) -> str:
    """Return a configuration's text with another table in one of its pools.

    Raises:
        ConfigError: the pool is not written in a form that can be changed line by line.
    """
    node = _pool_node(yaml.compose(text), pool)
    if node is None or node.flow_style:
        raise ConfigError(
            f"pool {pool!r} is not written as lines of its own, so nothing was put into it; paste "
            "the table of the report"
        )
    first_key, _ = node.value[0]
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    begin = end = _end_line(node.value[-1][1])
    for key, value in node.value:
        if key.value == _KEY:
            begin, end = key.start_mark.line, _end_line(value)
    if begin == first_key.start_mark.line:
        raise ConfigError(f"pool {pool!r}: {_KEY} must not be its first key; move it down")
    margin = " " * first_key.start_mark.column
    block = indent(yaml.safe_dump({_KEY: dict(table)}, sort_keys=False), margin)
    return "".join([*lines[:begin], block, *lines[end:]])


def _pool_node(root: Any, pool: str) -> Any:
    """Return the mapping of a pool; None where there is none of that name."""
    pools = next((value for key, value in root.value if key.value == "pools"), None)
    for node in () if pools is None else pools.value:
        if any((key.value, value.value) == ("name", pool) for key, value in node.value):
            return node
    return None


def _end_line(node: Any) -> int:
    """Return the line after a node; that of a block collection ends before what follows it."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        mark = node.end_mark
        return int(mark.line + (mark.column > 0))
    last = node.value[-1]
    return _end_line(last[1] if isinstance(node, yaml.MappingNode) else last)
