"""JSON as this API reads it: whole objects in UTF-8, each name once; and a form's texts as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from ray_cluster.api.advice import wrong
from ray_cluster.errors import InvalidRequest

# no call needs as many; millions of them take seconds to read, and gigabytes of memory
_MAX_VALUES = 100_000


class _NoJson(ValueError):
    """A text is no JSON, in the API's words."""


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in ``raw``.

    Raises:
        InvalidRequest: not UTF-8, not JSON, not an object, too many values or nested too deeply, a
            name given twice.
    """
    if sum(raw.count(mark) for mark in b",[{") > _MAX_VALUES:
        raise _not_json(f"it has more than {_MAX_VALUES} values or commas")
    try:
        value = _loaded(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_json(f"it is not UTF-8 at byte {error.start}") from error
    except _NoJson as error:
        raise _not_json(str(error)) from error
    if not isinstance(value, dict):
        raise _not_json('it is not an object like {"prompt": "a red circle"}')
    return value


def typed_texts(texts: Mapping[str, str], kind: type[BaseModel]) -> dict[str, Any]:
    """Return the values of a form's texts, by the types of the fields that they are for.

    Texts stay as they are. All else is JSON: ``true``, ``0.5``, or a list in one text. What is no
    JSON stays a text, which the check of the fields then refuses by name.

    Args:
        kind: of the fields.

    Raises:
        InvalidRequest: what begins as a list or an object is no JSON, or gives a name twice.
    """
    as_text = _text_fields(kind)
    return {name: text if name in as_text else _value(name, text) for name, text in texts.items()}


def is_text(value: str) -> bool:
    """Whether a string is made of whole characters; JSON's escapes can write half ones."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _loaded(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique_names, parse_constant=_refuse_constant)
    except RecursionError:
        reason = "it is nested too deeply"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno} column {error.colno}"
    except _NoJson:
        raise
    except ValueError:
        # Python's own bound on the digits of one integer
        reason = "it holds a number with thousands of digits"
    raise _NoJson(reason)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's values by name; refuse one that gives a name twice."""
    values: dict[str, Any] = {}
    for name, value in pairs:
        if not is_text(name):
            raise _not_json(f"the name {name[:100]!r} holds half a character (a lone surrogate)")
        if name in values:
            raise wrong(name[:100], "is given more than once", "once", code="duplicate_parameter")
        values[name] = value
    return values


def _refuse_constant(name: str) -> float:
    raise _NoJson(f"{name} is not a JSON number")


def _not_json(reason: str) -> InvalidRequest:
    return InvalidRequest(
        f"The body cannot be read as a JSON object: {reason}.", code="invalid_json"
    )


def _value(name: str, text: str) -> Any:
    # as Python's clients write them
    known = {"True": True, "False": False}
    if text in known:
        return known[text]
    try:
        return _loaded(text)
    except _NoJson as error:
        if text.lstrip()[:1] not in {"[", "{"}:
            return text
        raise wrong(name, f"cannot be read as JSON: {error}", code="invalid_json") from error


@cache
def _text_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields that are texts, and names that no field has."""
    fields = kind.model_fields.items()
    return frozenset(name for name, field in fields if _is_text_type(field.annotation))


def _is_text_type(annotation: Any) -> bool:
    """Whether a field's values are texts: any, or some, or none of them."""
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    kinds = [one for one in get_args(annotation) if one is not type(None)]
    is_union = get_origin(annotation) in {Union, UnionType}
    return annotation is str or (is_union and all(map(_is_text_type, kinds)))
