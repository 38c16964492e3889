"""The texts of a form as the values that JSON would have: a form knows only texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel


def typed_texts(texts: Mapping[str, str], kind: type[BaseModel]) -> dict[str, Any]:
    """Return the values of a form's texts, by the types of the fields that they are for.

    Texts stay as they are. All else is JSON: ``true``, ``0.5``, or a list in one text. What is no
    JSON stays a text, which the check of the fields then refuses by name.

    Args:
        kind: of the fields.
    """
    return {
        name: text if name in _text_fields(kind) else _value(text) for name, text in texts.items()
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


def _value(text: str) -> Any:
    # as Python's clients write them
    known = {"True": True, "False": False}
    if text in known:
        return known[text]
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> float:
    raise ValueError(name)
