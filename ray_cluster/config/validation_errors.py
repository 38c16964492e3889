"""What is wrong with values that pydantic refused, in words."""

from __future__ import annotations

import difflib
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ray_cluster.config.section import section_in

# the end of "'n' must be ..." by pydantic's error type, filled with the error's context
_MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "string_too_long": "at most {max_length} characters",
    "string_unicode": "text without half characters (lone surrogates)",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "literal_error": "{expected}",
}


# share of the letters of two names that agree; below it another name is no slip of the pen
_NEAR = 0.75
_MAX_NAME_CHARS = 100
# names that are compared letter by letter: long ones take milliseconds each
_MOST_COMPARED = 16


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the known name that is probably meant; None where none is near."""
    by_lower = {one.lower(): one for one in known}
    lower = given[:_MAX_NAME_CHARS].lower()
    if lower in by_lower:
        return by_lower[lower]
    # "gpus" for "num_gpus", or the other way round
    near = [one for one in by_lower if len(lower) > 3 and one.endswith(f"_{lower}")]
    near += [one for one in by_lower if len(one) > 3 and lower.endswith(f"_{one}")]
    alike = heapq.nlargest(_MOST_COMPARED, by_lower, key=likeness_to(lower))
    near = near or difflib.get_close_matches(lower, alike, n=1, cutoff=_NEAR)
    return by_lower[near[0]] if near else None


def likeness_to(given: str) -> Callable[[str], float]:
    """Return what measures how alike names are to a given one, in [0, 1], within microseconds.

    It is the share of their pairs of letters that agree.
    """
    pairs = _pairs(given)

    def measure(other: str) -> float:
        others = _pairs(other)
        return 2 * len(pairs & others) / (len(pairs) + len(others))

    return measure


def _pairs(name: str) -> set[tuple[str, str]]:
    # with its ends, so that a name of one letter has some
    return set(pairwise(f"^{name}$"))


def must_be(item: Mapping[str, Any]) -> str | None:
    """Return what a value must be, as the end of a sentence; None where pydantic's words must do.

    Args:
        item: one of a ``ValidationError``'s errors.
    """
    kind, given = item["type"], item.get("input")
    if kind == "float_type" and isinstance(given, int) and not isinstance(given, bool):
        # a whole number that is too large for a float
        kind = "finite_number"
    if kind not in _MUST_BE:
        return None
    context = {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in item.get("ctx", {}).items()
    }
    return _MUST_BE[kind].format(**context)


def describe(error: ValidationError, root: type[BaseModel]) -> str:
    """Return every problem: the key, what was given, what is allowed.

    What was given for a secret is left out: a ``SecretStr``, or a field with ``repr=False``.

    Args:
        root: the model that was validated.
    """
    rows: list[str] = []
    # sections whose keys are listed already
    listed: set[type[BaseModel]] = set()
    items = error.errors(include_url=False)
    for item in items:
        place = item["loc"]
        if item["type"] == "too_short" and any(
            len(one["loc"]) > len(place) and one["loc"][: len(place)] == place for one in items
        ):
            # pydantic counts only the valid ones
            continue
        if item["type"] == "extra_forbidden":
            section = _section_at(place[:-1], root)
            hint = _hint(str(place[-1]), section, root)
            allowed = "" if section in listed else f"allowed: {', '.join(section.model_fields)}"
            listed.add(section)
            rows.append(f"{_dotted(place)}: there is no such key; {hint}{allowed}".rstrip("; "))
            continue
        given = item.get("input")
        is_shown = not isinstance(given, dict | list | tuple) and not _is_secret(place, root)
        shown = f" (given {_short(given)})" if is_shown else ""
        key = f"{_dotted(place)}: " if place else ""
        rows.append(f"{key}{_message(item)}{shown}")
    return "; ".join(rows)


def _message(item: ErrorDetails) -> str:
    if item["type"] == "missing":
        return "is missing"
    allowed = must_be(item)
    return item["msg"].removeprefix("Value error, ") if allowed is None else f"must be {allowed}"


def _short(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _dotted(place: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in place)


def _hint(key: str, section: type[BaseModel], root: type[BaseModel]) -> str:
    """Return a key of this section, or else of another, that may be meant."""
    near = nearest(key, section.model_fields)
    if near is None:
        everywhere = dict(_keys(root, ""))
        near = everywhere.get(nearest(key, everywhere) or "")
    return "" if near is None else f"did you mean {near!r}? "


def _section_at(place: tuple[str | int, ...], root: type[BaseModel]) -> type[BaseModel]:
    """Return the section that stands at a place of the configuration, as pydantic names it."""
    section = root
    for part in place:
        # a number is the place in a list of sections, whose type the key before has given
        if isinstance(part, str) and part in section.model_fields:
            section = section_in(section.model_fields[part].annotation) or section
    return section


def _is_secret(place: tuple[str | int, ...], root: type[BaseModel]) -> bool:
    """Return whether a field at a place of the configuration, or right below it, is a secret."""
    section, field = root, None
    for part in place:
        if isinstance(part, str) and part in section.model_fields:
            field = section.model_fields[part]
            if _holds_secret(field):
                return True
            section = section_in(field.annotation) or section
    inner = None if field is None else section_in(field.annotation)
    return inner is not None and any(_holds_secret(one) for one in inner.model_fields.values())


def _holds_secret(field: FieldInfo) -> bool:
    annotation = field.annotation
    return not field.repr or SecretStr in (annotation, *get_args(annotation))


def _keys(section: type[BaseModel], path: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the dotted path of every key in and below a section."""
    for name, field in section.model_fields.items():
        yield name, f"{path}{name}"
        inner = section_in(field.annotation)
        if inner is not None:
            yield from _keys(inner, f"{path}{name}.")
