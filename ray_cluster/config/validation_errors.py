"""Says what is wrong with a configuration, key by key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ray_cluster.config.pydantic_messages import must_be


def describe(error: ValidationError, root: type[BaseModel]) -> str:
    """Return every problem: the key, what was given, what is allowed.

    Args:
        root: the section that was validated.
    """
    rows = []
    items = error.errors(include_url=False)
    for item in items:
        place = item["loc"]
        if item["type"] == "too_short" and any(
            len(one["loc"]) > len(place) and one["loc"][: len(place)] == place for one in items
        ):
            # pydantic counts only the valid ones
            continue
        key = ".".join(str(part) for part in place)
        if item["type"] == "extra_forbidden":
            rows.append(f"{key}: {_unknown_key(item['loc'], root)}")
            continue
        given = item.get("input")
        shown = "" if isinstance(given, dict | list | tuple) else f" (given {_short(given)})"
        rows.append(f"{_message(item)}{shown}" if not place else f"{key}: {_message(item)}{shown}")
    return "; ".join(rows)


def _message(item: ErrorDetails) -> str:
    if item["type"] == "missing":
        return "is missing"
    allowed = must_be(item)
    return item["msg"].removeprefix("Value error, ") if allowed is None else f"must be {allowed}"


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _unknown_key(place: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return what to write instead of a key that does not exist."""
    known = list(_section_at(place[:-1], root).model_fields)
    near = difflib.get_close_matches(str(place[-1]), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"there is no such key; {hint}allowed: {', '.join(known)}"


def _section_at(place: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel]:
    """Return the section that stands at a place of the configuration, as pydantic names it."""
    section = root
    for part in place:
        # a number is the place in a list of sections, whose type the key before has given
        if isinstance(part, str):
            annotation: Any = section.model_fields[part].annotation
            section = next(iter(get_args(annotation)), annotation)
    return section
