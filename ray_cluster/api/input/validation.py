"""From a JSON object to valid fields: every problem is named in the API's own words."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from ray_cluster.api.advice import (
    ELSEWHERE,
    FORMS,
    INSTEAD,
    REFUSED,
    REFUSED_WITHOUT_IMAGE,
    REQUIRED,
    missing,
    refused,
    wrong,
)
from ray_cluster.api.input.schemas import ImageGenerationRequest
from ray_cluster.api.input.strict_json import is_text
from ray_cluster.config.section import section_in
from ray_cluster.config.validation_errors import must_be, nearest
from ray_cluster.errors import InvalidRequest

FieldsT = TypeVar("FieldsT", bound=BaseModel)

MAX_PROBLEMS = 5

# of any model
# larger ones are no slip of the pen
_MOST_PLAIN = 1e9
_LEAST_SIDE_PX = 8
_TWO_NUMBERS = re.compile(r"\s*([1-9][0-9]{0,5})\D{1,5}([1-9][0-9]{0,5})\s*", re.ASCII)
_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?", re.ASCII)


def validate(body: Mapping[str, Any]) -> ImageGenerationRequest:
    """Return the fields of a call for images from text; null means absent, whatever the field.

    Raises:
        InvalidRequest: names the first wrong parameter; its message tells of up to five.
    """
    return validate_as(ImageGenerationRequest, body, REFUSED | REFUSED_WITHOUT_IMAGE)


def validate_as(
    kind: type[FieldsT], body: Mapping[str, Any], not_offered: Mapping[str, str]
) -> FieldsT:
    """Return the fields of a call, as :func:`validate` does.

    Args:
        not_offered: fields that are refused by name, with what to do instead.
    """
    body = {name: value for name, value in body.items() if value is not None}
    problems = [refused(name, not_offered[name]) for name in not_offered if name in body]
    problems += [
        wrong(name[:100], "holds half a character (a lone surrogate)", "remove")
        for name, value in body.items()
        if isinstance(value, str) and not is_text(value)
    ]
    offered = {name: value for name, value in body.items() if name not in not_offered}
    try:
        fields = kind.model_validate(offered)
    except ValidationError as error:
        known = {problem.param for problem in problems}
        details = [one for one in error.errors(include_url=False) if one["loc"][0] not in known]
        problems += [_problem(item, kind) for item in details[:MAX_PROBLEMS]]
    else:
        if not problems:
            return fields
    message = " ".join(problem.message for problem in problems[:MAX_PROBLEMS])
    raise InvalidRequest(message, problems[0].param, problems[0].code)


def _problem(item: ErrorDetails, fields: type[BaseModel]) -> InvalidRequest:
    """Return the error for a field, or for the key of an object in a list."""
    name, kind, given = str(item["loc"][0]), item["type"], item["input"]
    param, last, owner = name[:100], name, fields
    is_entry = len(item["loc"]) == 3
    if is_entry:
        # the field, the object's place, its key
        last = str(item["loc"][2])
        param = f"{name}[{item['loc'][1]}].{last[:100]}"
        parts = map(section_in, _parts(fields.model_fields[name].annotation))
        owner = next(one for one in parts if one is not None)
    if kind == "extra_forbidden":
        known = [*owner.model_fields, *getattr(owner, "image_fields", ())]
        near = _near(last, known)
        hint = f"Did you mean {near!r}?" if near else f"There are {', '.join(known)}."
        return wrong(param, "is unknown", more=hint, code="unknown_parameter")
    if kind == "missing":
        form = (is_entry and _right_entry(given, name)) or "add it"
        return missing(param, form if is_entry else REQUIRED[name])
    allowed = (None if is_entry else FORMS.get(name)) or must_be(item) or item["msg"]
    # only lists have places in them
    if len(item["loc"]) == 2:
        allowed = "a list of objects" if allowed == "a mapping" else f"a list of {allowed}"
    # a whole number is a number, though it may be larger than any float
    is_number = kind == "float_type" and type(given) is int and not is_entry
    entry = "" if is_entry else _right_entry(given, name)
    hints = (_right_form(given, kind, last), entry and f"W{entry[1:]}.", INSTEAD.get(param))
    return wrong(
        param,
        f"must be {allowed}; given {describe(given)}",
        more=" ".join(hint for hint in hints if hint),
        code="invalid_type" if kind.endswith("_type") and not is_number else "invalid_value",
    )


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield what a type consists of: ``list[A] | None`` of lists of A."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _near(name: str, known: Collection[str]) -> str | None:
    elsewhere = ELSEWHERE.get(name.lower())
    return elsewhere if elsewhere in known else nearest(name, known)


def _right_form(given: object, kind: str, name: str) -> str | None:
    """Return how to write what was probably meant; None if that is not plain."""
    if isinstance(given, str) and name == "size":
        found = _TWO_NUMBERS.fullmatch(given)
        # "16:9" is a ratio
        if found is None or min(int(found[1]), int(found[2])) < _LEAST_SIDE_PX:
            return None
        return f"Write '{found[1]}x{found[2]}'."
    if isinstance(given, str) and (
        (kind in {"int_type", "float_type"} and _NUMBER.fullmatch(given))
        or (kind == "bool_type" and given in {"true", "false"})
    ):
        return f"Write {given} without quotes."
    if (
        isinstance(given, float)
        and kind == "int_type"
        and given.is_integer()
        and abs(given) < _MOST_PLAIN
    ):
        return f"Write {given:.0f}."
    return None


def _right_entry(given: object, field: str) -> str | None:
    """Return how to write LoRAs that were given by their names, or by names and scales."""
    if field != "loras":
        return None
    scale: object
    match given:
        case str() if given:
            name, _, number = given.partition(":")
            is_scaled = _NUMBER.fullmatch(number)
            name, scale = (name, float(number)) if is_scaled else (given, 1)
        case {"name": str(name), **more}:
            scale = more.get("scale", 1)
        case dict() if given and all(type(one) in (int, float) for one in given.values()):
            name, scale = next(iter(given.items()))
        case _:
            return None
    if name == "scale" or type(scale) not in (int, float):
        return None
    return f"write {json.dumps([{'name': name[:100], 'scale': scale}])}"


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


def check_query(request: Request, allowed: Collection[str]) -> None:
    """Refuse what would be ignored: parameters that there are not, and all but one of a name."""
    names = [name for name, _ in request.query_params.multi_items()]
    each = f"Give each of {', '.join(allowed)} once or not at all."
    for name in names:
        if name not in allowed:
            raise wrong(name[:100], "is unknown here", more=each, code="unknown_parameter")
        if names.count(name) > 1:
            raise wrong(name, "is given twice", more=each)
