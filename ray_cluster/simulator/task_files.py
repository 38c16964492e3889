"""Reads what is to be simulated from YAML files, and says what is wrong with one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ray_cluster.config_problems import describe
from ray_cluster.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a file of keys and values.

    Args:
        path: of a YAML file.
        what: the file is, for errors.

    Raises:
        ConfigError: it can't be read, or holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ConfigError(f"cannot read the {what} {path}: it is nested too deeply") from None
    # ValueError: dates and numbers that there are not
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the {what} {path}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"the {what} {path} must hold keys and values; given {content!r:.80}")
    return content


def validated(model: type[_Model], content: Mapping[str, Any], path: Path, what: str) -> _Model:
    """Return the content as a model; ConfigError names the key, what was given, what is allowed."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"the {what} {path}: {describe(error, model)}") from None
