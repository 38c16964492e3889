"""Reads what is to be simulated from YAML files, and says what is wrong with one."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from ray_cluster.config_problems import describe
from ray_cluster.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)
_MOST_BYTES = 4_000_000

PrintedName = Annotated[
    str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")
]
"""A name as it is shown in tables: without control characters."""


class _OnceLoader(yaml.SafeLoader):
    """Refuses what is said twice: the first would be lost without a word."""

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
        if path.exists() and not path.is_file():
            raise ConfigError(f"the {what} {path} is no file")
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"the {what} {path} has more than {_MOST_BYTES:,} bytes")
        # a safe loader as well
        content = yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)  # noqa: S506
    except RecursionError:
        raise ConfigError(f"cannot read the {what} {path}: it is nested too deeply") from None
    # ValueError: dates and numbers that there are not
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from None
    if not isinstance(content, dict):
        given = reprlib.repr(content)
        raise ConfigError(f"the {what} {path} must hold keys and values; given {given:.80}")
    return content


def validated(model: type[_Model], content: Mapping[str, Any], path: Path, what: str) -> _Model:
    """Return the content as a model; ConfigError names the key, what was given, what is allowed."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"the {what} {path}: {describe(error, model)}") from None
