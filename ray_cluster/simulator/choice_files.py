"""Files of what a search chose: a list in JSON, a line for each choice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import TypeAdapter, ValidationError

from ray_cluster.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Choice = TypeVar("_Choice", bound="DataclassInstance")


def save_choices(path: Path, choices: Sequence[DataclassInstance]) -> None:
    """Write choices to a file."""
    lines = ",\n".join(json.dumps(asdict(one)) for one in choices)
    path.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def load_choices(path: Path, choice: type[_Choice], *, command: str) -> list[_Choice]:
    """Return the choices of a file.

    Args:
        path: of the file.
        choice: what each is.
        command: that writes such files.

    Raises:
        ConfigError: it can't be read, or holds something else.
    """
    try:
        read: list[_Choice] = TypeAdapter(list[choice]).validate_json(path.read_bytes())  # type: ignore[valid-type]
    except OSError as error:
        raise ConfigError(f"cannot read the choices {path}: {error}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"the choices {path}: {place}: {first['msg']}; write them with {command}"
        ) from None
    return read
