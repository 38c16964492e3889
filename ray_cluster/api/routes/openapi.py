"""JSON schemas: the OpenAPI document with the present settings' bounds, and events of streams."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from ray_cluster.api.input.image_store import ID_PATTERN
from ray_cluster.api.input.schemas import (
    FileUpload,
    ImageEditRequest,
    ImageGenerationRequest,
    ImageVariationRequest,
    PreprocessRequest,
)
from ray_cluster.api.output.resource_schemas import ErrorResponse
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.requests import UPSCALE_FACTORS

_REF = "#/components/schemas/{model}"
_ERROR = _REF.format(model=ErrorResponse.__name__)
# the endpoints of these calls read the body by themselves, bounded and strictly
_KINDS: Mapping[str, tuple[type[ImageGenerationRequest], ...]] = {
    "/v1/images/generations": (ImageGenerationRequest,),
    "/v1/images/estimate": (ImageGenerationRequest,),
    "/v1/images/edits": (ImageEditRequest,),
    "/v1/images/variations": (ImageVariationRequest,),
    "/v1/jobs": (ImageGenerationRequest, ImageEditRequest),
}
# the fields that hold images, in a form and in JSON
_FILE: dict[str, Any] = {"type": "string", "format": "binary"}
# no image is shorter
_TEXT: dict[str, Any] = {"type": "string", "contentEncoding": "base64", "minLength": 16}
_ID: dict[str, Any] = {"type": "string", "pattern": ID_PATTERN}
_OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"image_url": {**_TEXT, "description": "A data URL."}},
    "required": ["image_url"],
    "additionalProperties": False,
}
_FILE_OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"file_id": {**_ID, "description": "Of an uploaded file."}},
    "required": ["file_id"],
    "additionalProperties": False,
}
_ANY_IMAGE: dict[str, Any] = {"anyOf": [_TEXT, _ID, _OBJECT, _FILE_OBJECT]}
_CONTROL_IMAGE: dict[str, Any] = {
    **_ANY_IMAGE,
    "description": "The image that it follows: in base64, as a data URL, or the id of an uploaded "
    "file. In a form also `@` and the name of another file part.",
}
# fields of a form whose text is JSON
_IN_JSON_TEXT = ("allow", "loras", "controlnets")
_SENT = "A png, jpeg or webp."
_IMAGE = "The image to edit: a png, jpeg or webp."
_MASK = (
    "A png or webp of the image's size with an alpha channel: what is transparent there (alpha "
    "below 128) is edited. Everything, if absent."
)
_IN_JSON = " In base64, or as a data URL."
_SEVERAL = " Several, for a model that takes them: {}."

ERRORS = {
    400: "A parameter is wrong: the message says what was given and what is allowed.",
    401: "No valid API key (only where the service is configured with keys).",
    404: "There is no such thing (model, LoRA, job, file), or not any more.",
    408: "The body has not arrived in time.",
    409: "The job of this `Idempotency-Key` was cancelled; another LoRA has this name.",
    410: "The images of this `Idempotency-Key` were made, and are forgotten by now.",
    413: "The body or an image is too large.",
    415: "The body is neither JSON nor, where that is taken, a form.",
    422: "The `Idempotency-Key` has named a call with another body.",
    429: "The queue is full, or you have too much in flight; `Retry-After` says when to come back.",
    431: "The path and the headers are too large.",
    500: "The model failed on this request.",
    503: "The model is loading, or the dispatcher does not answer; try again.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the documentation of a call's errors."""
    texts: dict[int | str, str] = {status: ERRORS[status] for status in statuses}
    # also keeps FastAPI from documenting its own 422, which this API never sends
    texts["default"] = "Any other error."
    return {key: error(text) for key, text in texts.items()}


def error(text: str) -> dict[str, Any]:
    """Return the documentation of one error: by reference, as FastAPI would compile its model
    anew for every status of every route."""
    return {"content": {"application/json": {"schema": {"$ref": _ERROR}}}, "description": text}


def describe_by_settings(app: FastAPI, settings: CurrentSettings) -> None:
    """Have the application's OpenAPI document follow the settings."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        document = copy.deepcopy(describe())
        for path, kinds in _KINDS.items():
            document["paths"][path]["post"]["requestBody"] = _body(kinds, settings)
        schema = ErrorResponse.model_json_schema(ref_template=_REF)
        schemas = schema.pop("$defs") | {ErrorResponse.__name__: schema}
        document["components"]["schemas"] |= schemas
        if settings.is_open:
            _leave_keys_out(document)
        return document

    # as FastAPI's own documentation has it replaced
    app.openapi = described  # type: ignore[method-assign]


def _leave_keys_out(document: dict[str, Any]) -> None:
    for path in document["paths"].values():
        for operation in path.values():
            operation.pop("security", None)
    document.get("components", {}).pop("securitySchemes", None)


def _body(
    kinds: tuple[type[ImageGenerationRequest], ...], settings: CurrentSettings
) -> dict[str, Any]:
    schemas = [_request_schema(kind, settings) for kind in kinds]
    examples = {
        f"{kind.__name__} {number}": {"value": example}
        for kind, schema in zip(kinds, schemas, strict=True)
        for number, example in enumerate(schema.pop("examples", ()), start=1)
    }
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    content: dict[str, Any] = {"application/json": {"schema": schema, "examples": examples}}
    if issubclass(kinds[-1], ImageEditRequest):
        content["multipart/form-data"] = {
            "schema": _form_schema(kinds[-1], settings),
            # a list is one text, not a part for each of its items
            "encoding": {name: {"contentType": "application/json"} for name in _IN_JSON_TEXT},
        }
    return {"required": True, "content": content}


def _request_schema(
    kind: type[ImageGenerationRequest], settings: CurrentSettings
) -> dict[str, Any]:
    """Return a JSON body's schema; bounds that depend on the model are in ``GET /v1/models``."""
    schema = _fields_schema(kind, settings)
    if issubclass(kind, ImageEditRequest):
        _add_images(schema, kind, _TEXT, _IN_JSON)
        schema["properties"]["images"] = {
            "type": "array",
            "items": _ANY_IMAGE,
            "minItems": 1,
            "maxItems": kind.max_images,
            "description": "OpenAI's way to write `image`, and instead of it."
            + _several(kind, "a mask is of the first"),
        }
        schema["required"].remove("image")
        schema["oneOf"] = [{"required": ["image"]}, {"required": ["images"]}]
    return schema


def _form_schema(kind: type[ImageEditRequest], settings: CurrentSettings) -> dict[str, Any]:
    """Return the schema of a form: its parts are texts or files."""
    schema = _fields_schema(kind, settings)
    schema.pop("examples", None)
    for field in schema["properties"].values():
        _leave_null_out(field)
    _add_images(schema, kind, _FILE, _several(kind, "repeat the part, or call all `image[]`"))
    return schema


def _leave_null_out(field: dict[str, Any]) -> None:
    # a part cannot be null; it can be left out
    if "anyOf" in field:
        field["anyOf"] = [one for one in field["anyOf"] if one["type"] != "null"]
        field.pop("default", None)


def _add_images(
    schema: dict[str, Any], kind: type[ImageGenerationRequest], one: dict[str, Any], how: str
) -> None:
    schema["properties"]["image"] = {**one, "description": _IMAGE + how}
    schema["required"] = [*schema.get("required", []), "image"]
    if "mask" in kind.image_fields:
        schema["properties"]["mask"] = {**one, "description": _MASK + how}


def _several(kind: type[ImageEditRequest], how: str) -> str:
    return _SEVERAL.format(how) if kind.max_images > 1 else ""


def _fields_schema(kind: type[ImageGenerationRequest], settings: CurrentSettings) -> dict[str, Any]:
    # all parts of the schema are inside it: no reference to other components
    schema = copy.deepcopy(inlined_schema(kind))
    limits = settings.latest.limits
    num_images = min(limits.max_images_per_request, limits.max_queued_images)
    _bound(schema, "prompt", "maxLength", limits.max_prompt_chars)
    _bound(schema, "negative_prompt", "maxLength", limits.max_prompt_chars)
    _bound(schema, "n", "maximum", num_images)
    _add_control_images(schema)
    if (most := settings.max_num_inference_steps) is not None:
        _bound(schema, "num_inference_steps", "maximum", most)
    _bound(schema, "upscale", "enum", list(UPSCALE_FACTORS) if settings.latest.upscalers else [1])
    return schema


def preprocess_body() -> dict[str, Any]:
    """Return the request body of a call for a map."""
    return _with_one_image(PreprocessRequest, "image", _ANY_IMAGE)


def upload_body() -> dict[str, Any]:
    """Return the request body of an upload, which is a form."""
    body = _with_one_image(FileUpload, "file", {})
    del body["content"]["application/json"]
    return body


def _with_one_image(kind: type[BaseModel], name: str, text: dict[str, Any]) -> dict[str, Any]:
    schema = copy.deepcopy(inlined_schema(kind))
    given = enumerate(schema.pop("examples", ()), start=1)
    examples = {str(number): {"value": example} for number, example in given}
    schema["required"].append(name)
    form = copy.deepcopy(schema)
    for field in form["properties"].values():
        _leave_null_out(field)
    schema["properties"][name] = {**text, "description": _SENT}
    form["properties"][name] = {**_FILE, "description": _SENT}
    return {
        "required": True,
        "content": {
            "application/json": {"schema": schema, "examples": examples},
            "multipart/form-data": {"schema": form},
        },
    }


def _add_control_images(schema: dict[str, Any]) -> None:
    for one in schema["properties"]["controlnets"]["anyOf"]:
        if one["type"] == "array":
            one["items"]["properties"]["image"] = _CONTROL_IMAGE
            one["items"]["required"].append("image")


def _bound(schema: dict[str, Any], name: str, keyword: str, bound: int | list[int]) -> None:
    """Add a bound to a field, which may also be null."""
    field = schema["properties"][name]
    for one in field.get("anyOf", [field]):
        if one["type"] != "null":
            one[keyword] = bound


def event_stream(events: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """Return the content of a reply that is a stream of server-sent events.

    The schema is that of one event, whose data are JSON: what OpenAPI 3.2 calls ``itemSchema`` and
    its readers take from ``schema`` before.

    Args:
        events: the data's model by the event's name.
    """
    kinds = [
        {
            "type": "object",
            "required": ["event", "data"],
            "properties": {
                "event": {"const": name},
                "id": {"type": "string"},
                "data": {
                    "type": "string",
                    "contentMediaType": "application/json",
                    "contentSchema": inlined_schema(model),
                },
            },
        }
        for name, model in events.items()
    ]
    return {"text/event-stream": {"schema": {"anyOf": kinds}}}


@cache
def inlined_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON schema with its parts in their places, without references.

    The same one for every call: it must not be changed.
    """
    schema = model.model_json_schema()
    parts = schema.pop("$defs", {})

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if (reference := node.get("$ref")) is not None:
            return inlined(parts[reference.rpartition("/")[2]])
        return {name: inlined(value) for name, value in node.items()}

    found: dict[str, Any] = inlined(schema)
    return found
