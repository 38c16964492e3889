"""From a JSON object to valid fields: every problem is named in the API's own words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from http import HTTPStatus
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from ray_cluster.api.errors import ApiError
from ray_cluster.api.input.bounded_body import is_text
from ray_cluster.api.input.schemas import REFUSED, REFUSED_WITHOUT_IMAGE, ImageGenerationRequest
from ray_cluster.config.validation_errors import must_be, nearest, section_in
from ray_cluster.errors import InvalidRequest

FieldsT = TypeVar("FieldsT", bound=BaseModel)

MAX_PROBLEMS = 5

# what to do about a value that is not offered
_INSTEAD = {
    "quality": "Set the effort with 'num_inference_steps' instead.",
    "background": "Images have no alpha channel.",
    "output_format": "Pixels only: no vector images and no animations.",
    "seed": "For a random seed leave it out, or send null.",
    "num_inference_steps": "For the model's own number leave it out, or send null.",
}
# what to say in a field that is required
_REQUIRED = {
    "prompt": "say what the image shall show",
    "name": "say how calls are to choose it",
    "base": "say for which model it is made",
    "source": "say where its file is",
    "preprocess": "say which detector makes the map",
    "purpose": "send 'vision'",
}
# what other servers call a field
_ELSEWHERE = {
    "batch_size": "n",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "format": "output_format",
    "guidance": "guidance_scale",
    "height": "size",
    "negative": "negative_prompt",
    "num_images": "n",
    "num_images_per_prompt": "n",
    "num_outputs": "n",
    "num_steps": "num_inference_steps",
    "sampler_name": "sampler",
    "scheduler": "sampler",
    "width": "size",
    "denoising_strength": "strength",
    "image_strength": "strength",
    "init_image": "image",
    "mask_blur": "feather_px",
    "mask_image": "mask",
    "lora": "loras",
    "controlnet": "controlnets",
    "control": "controlnets",
    "control_image": "controlnets",
    "conditioning_scale": "scale",
    "controlnet_conditioning_scale": "scale",
    "control_guidance_start": "start",
    "control_guidance_end": "end",
    "strength": "scale",
    "weight": "scale",
    "lora_weights": "loras",
}

_FORMS = {
    "size": "'auto' or WIDTHxHEIGHT in pixels, like '64x64'",
    "name": "1 to 64 letters, digits, '.', '_' and '-', beginning with a letter or digit",
    "sha256": "the 64 hexadecimal digits of the file's SHA-256, in lower case",
}
# of any model
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
    problems += [_half_character(name) for name, value in body.items() if not _is_whole(value)]
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


def _is_whole(value: object) -> bool:
    return not isinstance(value, str) or is_text(value)


def _half_character(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"The parameter {name[:100]!r} holds half a character (a lone surrogate); remove it.",
        param=name[:100],
    )


def refused(name: str, instead: str) -> InvalidRequest:
    """Return the error for a parameter that is not offered, with what to do instead."""
    return InvalidRequest(
        f"The parameter {name!r} is not offered here. {instead}",
        param=name,
        code="unsupported_parameter",
    )


def _problem(item: ErrorDetails, fields: type[BaseModel]) -> InvalidRequest:
    name, kind = str(item["loc"][0]), item["type"]
    # of an object in a list: the field, its place, the object's key
    if len(item["loc"]) == 3:
        return _in_entry(item, fields)
    if kind == "extra_forbidden":
        return _unknown(name, fields)
    if kind == "missing":
        return InvalidRequest(
            f"The parameter {name!r} is required; {_REQUIRED[name]}.",
            param=name,
            code="missing_required_parameter",
        )
    allowed = _FORMS.get(name) or must_be(item) or item["msg"]
    # only lists have places in them
    if len(item["loc"]) > 1:
        allowed = "a list of objects" if allowed == "a mapping" else f"a list of {allowed}"
    # a whole number is a number, though it may be larger than any float
    is_number = kind == "float_type" and type(item["input"]) is int
    type_is_wrong = kind.endswith("_type") and not is_number
    message = f"The parameter {name!r} must be {allowed}; given {describe(item['input'])}."
    hints = (_right_form(item["input"], kind, name), _INSTEAD.get(name))
    return InvalidRequest(
        " ".join([message, *(hint for hint in hints if hint)]),
        param=name,
        code="invalid_type" if type_is_wrong else "invalid_value",
    )


def _in_entry(item: ErrorDetails, fields: type[BaseModel]) -> InvalidRequest:
    """Return the error for a key of an object in a list."""
    name, place, key = item["loc"]
    kind, field = item["type"], fields.model_fields[str(name)]
    param = f"{name}[{place}].{str(key)[:100]}"
    start = f"The parameter {param!r}"
    match kind:
        case "extra_forbidden":
            entry = next(one for one in map(section_in, _parts(field.annotation)) if one)
            known = [*entry.model_fields, *getattr(entry, "image_fields", ())]
            near = _near(str(key), known)
            advice = f"Did you mean {near!r}?" if near else f"There are {', '.join(known)}."
            message, code = f"{start} is unknown. {advice}", "unknown_parameter"
        case "missing":
            message, code = f"{start} is missing; add it.", "missing_required_parameter"
        case _:
            allowed = must_be(item) or item["msg"]
            message = f"{start} must be {allowed}; given {describe(item['input'])}."
            hint = _right_form(item["input"], kind, str(key))
            message = f"{message} {hint}" if hint else message
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return InvalidRequest(message, param=param, code=code)


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield what a type consists of: ``list[A] | None`` of lists of A."""
    yield annotation
    for part in get_args(annotation):
        yield from _parts(part)


def _unknown(name: str, fields: type[BaseModel]) -> InvalidRequest:
    known = [*fields.model_fields, *getattr(fields, "image_fields", ())]
    near = _near(name, known)
    hint = f"Did you mean {near!r}?" if near else f"There are {', '.join(known)}."
    return InvalidRequest(
        f"The parameter {name[:100]!r} is unknown. {hint}",
        param=name[:100],
        code="unknown_parameter",
    )


def _near(name: str, known: Collection[str]) -> str | None:
    elsewhere = _ELSEWHERE.get(name.lower())
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
    if isinstance(given, float) and kind == "int_type" and given.is_integer():
        return f"Write {given:.0f}."
    return None


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
    for name in names:
        if name not in allowed or names.count(name) > 1:
            what = "twice" if name in allowed else "and there is no such parameter here"
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                f"The parameter {name[:100]!r} is given {what}; give each of "
                f"{', '.join(allowed)} once or not at all.",
                code="invalid_value" if name in allowed else "unknown_parameter",
                param=name[:100],
            )
