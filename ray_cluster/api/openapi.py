"""The OpenAPI document, with the bounds of the settings as they are when it is read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from ray_cluster.api.request_schema import request_schema
from ray_cluster.api.settings import CurrentSettings

# the calls whose body the endpoints read by themselves
_GENERATING = ("/v1/images/generations", "/v1/jobs")


def json_body(settings: CurrentSettings) -> dict[str, Any]:
    """Return the description of the body of a call that makes images."""
    schema = request_schema(settings)
    examples = {example["prompt"]: {"value": example} for example in schema.pop("examples")}
    return {
        "required": True,
        "content": {"application/json": {"schema": schema, "examples": examples}},
    }


def describe_by_settings(app: FastAPI, settings: CurrentSettings) -> None:
    """Have the application describe itself by the present settings."""
    describe = app.openapi

    def described() -> dict[str, Any]:
        document = copy.deepcopy(describe())
        for path in _GENERATING:
            document["paths"][path]["post"]["requestBody"] = json_body(settings)
        if settings.is_open:
            _leave_keys_out(document)
        return document

    # as FastAPI's own documentation has it replaced
    app.openapi = described  # type: ignore[method-assign]


def _leave_keys_out(document: dict[str, Any]) -> None:
    for operation in _operations(document):
        operation.pop("security", None)
    document.get("components", {}).pop("securitySchemes", None)


def _operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in document["paths"].values():
        yield from path.values()
