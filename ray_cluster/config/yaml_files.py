"""Reads YAML files of keys and values, and says what is wrong with one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ray_cluster.errors import ConfigError

_MOST_BYTES = 4_000_000
_KINDS = {list: "a list", type(None): "nothing"}


class _KeyTwice(yaml.MarkedYAMLError):
    """A key is there twice."""


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that is there twice: the first value would be lost without a warning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return keys and values."""
        seen = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    problem = f"{_named(key, value)} is there twice"
                    raise _KeyTwice(problem=problem, problem_mark=key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a file of keys and values.

    Args:
        path: of a YAML file.
        what: the file is, for errors.

    Raises:
        ConfigError: it can't be read, or holds something else.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from None
    return parse_mapping(data, f"{what} {path}")


def parse_mapping(data: bytes, name: str) -> dict[str, Any]:
    """Return the keys and values of a file's content; errors as of :func:`read_mapping`.

    Errors quote nothing of the content, which may hold secrets.

    Args:
        name: what errors call the file.
    """
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"the {name} has more than {_MOST_BYTES:,} bytes")
    try:
        # a safe loader as well
        content = yaml.load(data.decode("utf-8"), _OnceLoader)  # noqa: S506
    except RecursionError:
        raise ConfigError(f"cannot read the {name}: it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"cannot read the {name}: {_without_quotes(error)}") from None
    # ValueError: dates and numbers that there are not
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise ConfigError(f"cannot read the {name}: {reason}") from None
    if not isinstance(content, dict):
        given = _KINDS.get(type(content), "a single value")
        raise ConfigError(f"the {name} must hold keys and values; given {given}")
    return content


def _named(key: yaml.ScalarNode, value: yaml.Node) -> str:
    # a key without a value may be a list's entry in the wrong brackets
    has_value = not isinstance(value, yaml.ScalarNode) or value.value != ""
    return f"the key {key.value!r:.80}" if has_value else "a key"


def _without_quotes(error: yaml.MarkedYAMLError) -> str:
    """Return where and what is wrong, without PyYAML's quotes of the line, names and tags."""
    problem = error.problem or "it is no YAML"
    is_plain = isinstance(error, _KeyTwice | yaml.parser.ParserError | yaml.scanner.ScannerError)
    if not is_plain or "tag handle" in problem:
        problem = _cut_at_quote(problem)
    words = f"{_cut_at_quote(error.context)}, {problem}" if error.context else problem
    begin = error.context_mark
    if begin is not None:
        words += f" (it begins at {_place(begin)})"
    return words if error.problem_mark is None else f"{_place(error.problem_mark)}: {words}"


def _cut_at_quote(words: str) -> str:
    return re.sub(r"""\s*['"].*""", "", words)


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
