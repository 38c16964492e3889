"""Reads YAML files of keys and values, and says what is wrong with one."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

import yaml

from ray_cluster.errors import ConfigError

_MOST_BYTES = 4_000_000


class _OnceLoader(yaml.SafeLoader):
    """Refuses a key that is there twice: the first value would be lost without a warning."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return keys and values; ConstructorError for a key that is there twice."""
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r:.80} is there twice", key.start_mark
                    )
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
    # ValueError: dates and numbers that there are not
    except (ValueError, yaml.YAMLError) as error:
        # PyYAML writes several lines, and calls a file that it was given the text of a string
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise ConfigError(f"cannot read the {name}: {reason}") from None
    if not isinstance(content, dict):
        given = reprlib.repr(content)
        raise ConfigError(f"the {name} must hold keys and values; given {given:.80}")
    return content
