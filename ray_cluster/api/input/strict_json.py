"""The texts of a form as the values that JSON would have: a form knows only texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from ray_cluster.api.input.bounded_body import unique_names
from ray_cluster.errors import InvalidRequest


def typed_texts(texts: Mapping[str, str], kind: type[BaseModel]) -> dict[str, Any]:
    """Return the values of a form's texts, by the types of the fields that they are for.

    Texts stay as they are. All else is JSON: ``true``, ``0.5``, or a list in one text. What is no
    JSON stays a text, which the check of the fields then refuses by name.

    Args:
        kind: of the fields.

    Raises:
        InvalidRequest: what begins as a list or an object is no JSON, or gives a name twice.
    """
    return {
        name: text if name in _text_fields(kind) else _value(name, text)
        for name, text in texts.items()
    }


@cache
def _text_fields(kind: type[BaseModel]) -> frozenset[str]:
    """Return the fields that are texts, and names that no field has."""
    return frozenset(
        name for name, field in kind.model_fields.items() if _is_text(field.annotation)
    )


def _is_text(annotation: Any) -> bool:
    """Whether a field's values are texts: any, or some, or none of them."""
    if get_origin(annotation) is Literal:
        return all(isinstance(value, str) for value in get_args(annotation))
    kinds = [one for one in get_args(annotation) if one is not type(None)]
    is_union = get_origin(annotation) in {Union, UnionType}
    return annotation is str or (is_union and all(map(_is_text, kinds)))


def _value(name: str, text: str) -> Any:
    # as Python's clients write them
    known = {"True": True, "False": False}
    if text in known:
        return known[text]
    try:
        return json.loads(text, object_pairs_hook=unique_names, parse_constant=_refuse)
    except RecursionError:
        reason = "it is nested too deeply"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at line {error.lineno} column {error.colno}"
    except ValueError as error:
        reason = str(error)
    if text.lstrip()[:1] not in {"[", "{"}:
        return text
    raise InvalidRequest(
        f"The parameter {name!r} cannot be read as JSON: {reason}.", name, code="invalid_json"
    )


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
