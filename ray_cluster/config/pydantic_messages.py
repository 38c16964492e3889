"""What a value must be, in words, where pydantic found it wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "literal_error": "{expected}",
}


def must_be(item: Mapping[str, Any]) -> str | None:
    """Return what a value must be, as the end of a sentence; None where pydantic's words must do.

    Args:
        item: one of a ``ValidationError``'s errors.
    """
    kind, given = item["type"], item.get("input")
    if kind == "float_type" and isinstance(given, int) and not isinstance(given, bool):
        # pydantic calls what no float can hold no float
        kind = "finite_number"
    if kind not in _MUST_BE:
        return None
    context = item.get("ctx", {})
    return _MUST_BE[kind].format(**{name: _short(value) for name, value in context.items()})


def _short(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value
