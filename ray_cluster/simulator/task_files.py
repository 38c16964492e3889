"""Reads what is to be simulated from YAML files, and says what is wrong with one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from ray_cluster.config.validation_errors import describe
from ray_cluster.errors import ConfigError

_Model = TypeVar("_Model", bound=BaseModel)

PrintedName = Annotated[
    str, Field(min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")
]
"""A name as it is shown in tables: without control characters."""


def validated(model: type[_Model], content: Mapping[str, Any], path: Path, what: str) -> _Model:
    """Return the content as a model; ConfigError names the key, what was given, what is allowed."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"the {what} {path}: {describe(error, model)}") from None
