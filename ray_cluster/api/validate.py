"""From a JSON object to valid fields: every problem is named in the API's own words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ray_cluster.api.body import is_text
from ray_cluster.api.schema import REFUSED, ImageGenerationRequest
from ray_cluster.config.validation_errors import must_be
from ray_cluster.errors import InvalidRequest

MAX_PROBLEMS = 5

# what to do about a value of OpenAI's that is not offered
_INSTEAD = {
    "quality": "Set the effort with 'num_inference_steps' instead.",
    "background": "Images have no alpha channel.",
    "output_format": "Pixels only: no vector images and no animations.",
}

_SIZE = "'auto' or WIDTHxHEIGHT in pixels, like '64x64'"


def validate(body: Mapping[str, Any]) -> ImageGenerationRequest:
    """Return the fields of a call.

    Raises:
        InvalidRequest: names the first wrong parameter; its message tells of up to five.
    """
    problems = [_refused(name) for name in REFUSED if body.get(name) is not None]
    problems += [_half_character(name) for name, value in body.items() if not _is_whole(value)]
    offered = {name: value for name, value in body.items() if name not in REFUSED}
    try:
        fields = ImageGenerationRequest.model_validate(offered)
    except ValidationError as error:
        known = {problem.param for problem in problems}
        details = [one for one in error.errors(include_url=False) if one["loc"][0] not in known]
        problems += [_problem(item) for item in details[:MAX_PROBLEMS]]
    else:
        if not problems:
            return fields
    message = " ".join(problem.message for problem in problems[:MAX_PROBLEMS])
    raise InvalidRequest(message, problems[0].param, problems[0].code)


def _is_whole(value: object) -> bool:
    return not isinstance(value, str) or is_text(value)


def _half_character(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"The parameter {name[:100]!r} holds half a character (a lone surrogate); remove it.",
        param=name[:100],
    )


def _refused(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"The parameter {name!r} is not offered here. {REFUSED[name]}",
        param=name,
        code="unsupported_parameter",
    )


def _problem(item: ErrorDetails) -> InvalidRequest:
    name, kind = str(item["loc"][0]), item["type"]
    if kind == "extra_forbidden":
        return _unknown(name)
    if kind == "missing":
        return InvalidRequest(
            f"The parameter {name!r} is required; say what the image shall show.",
            param=name,
            code="missing_required_parameter",
        )
    allowed = _SIZE if kind == "string_pattern_mismatch" else must_be(item) or item["msg"]
    # only lists have places in them
    allowed = allowed if len(item["loc"]) == 1 else f"a list of {allowed}"
    # a whole number is a number, though it may be larger than any float
    is_number = kind == "float_type" and type(item["input"]) is int
    type_is_wrong = kind.endswith("_type") and not is_number
    message = f"The parameter {name!r} must be {allowed}; given {describe(item['input'])}."
    instead = _INSTEAD.get(name)
    return InvalidRequest(
        f"{message} {instead}" if instead else message,
        param=name,
        code="invalid_type" if type_is_wrong else "invalid_value",
    )


def _unknown(name: str) -> InvalidRequest:
    known = list(ImageGenerationRequest.model_fields)
    # "steps" for "num_inference_steps"
    near = [one for one in known if len(name) > 3 and name in one]
    near = near or difflib.get_close_matches(name[:100], known, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}."
    return InvalidRequest(
        f"The parameter {name[:100]!r} is unknown. {hint}",
        param=name[:100],
        code="unknown_parameter",
    )


def describe(value: object) -> str:
    """Return a short form of a JSON value for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "an array"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
