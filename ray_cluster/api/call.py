"""From the body of a call to image requests."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from ray_cluster.api.auth import owner_of
from ray_cluster.api.body import BodyLimit, read_object
from ray_cluster.api.cascades import CascadeResolver
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.middleware import request_id_of
from ray_cluster.api.prompts import PromptCheck
from ray_cluster.api.resolve import resolve
from ray_cluster.api.schema import ImageGenerationRequest
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.api.validate import describe, validate
from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import ImageRequest

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class Call:
    """A valid call.

    Attributes:
        requests: one per image.
        body_digest: equal for equal bodies, however they are written.
        idempotency_key: the client's name for the call; None without one.
    """

    fields: ImageGenerationRequest
    requests: tuple[ImageRequest, ...]
    body_digest: str
    idempotency_key: str | None


class CallReader:
    """Reads and checks the body that the images endpoint and the jobs endpoint share."""

    def __init__(self, catalog: Catalog, prompts: PromptCheck, settings: CurrentSettings) -> None:
        self._catalog = catalog
        self._prompts = prompts
        self._cascades = CascadeResolver(catalog, prompts)
        self._settings = settings

    async def read(self, request: Request, *, is_job: bool = False) -> Call:
        """Return what a call asks for; the images of a job are always stored.

        Raises:
            ApiError: the body is no JSON object in bounds, or there is no such model.
            InvalidRequest: a parameter is wrong.
        """
        key = _idempotency_key(request)
        limits = self._settings.limits
        body = await read_object(request, BodyLimit.of_json(limits))
        fields = validate(body)
        if is_job:
            _check_job(fields)
        elif fields.stream:
            _check_stream(fields)
        elif fields.partial_images:
            raise InvalidRequest(
                f"The parameter 'partial_images' is {fields.partial_images}, which changes "
                "nothing without 'stream': previews come as events. Set stream to true.",
                "partial_images",
            )
        is_stored = is_job or key is not None or fields.response_format == "url"
        cascade = self._settings.cascade(fields.model)
        if cascade is not None:
            resolving = self._cascades.resolve(fields, cascade, limits, is_stored=is_stored)
            requests = await resolving
        else:
            profile = await self._catalog.profile(fields.model)
            requests = resolve(fields, profile, limits, is_stored=is_stored)
            await self._prompts.check(fields, profile)
        call_id = request_id_of(request)
        owner = owner_of(request)
        requests = tuple(replace(one, call_id=call_id, owner=owner) for one in requests)
        return Call(fields, requests, _digest(body), key)


def _check_job(fields: ImageGenerationRequest) -> None:
    if fields.response_format == "b64_json":
        raise InvalidRequest(
            "The parameter 'response_format' is 'b64_json', but the images of a job are "
            "fetched from its urls; leave it out or set it to 'url'.",
            "response_format",
        )
    if fields.stream:
        raise InvalidRequest(
            "The parameter 'stream' is true, but a job has its events elsewhere: leave it out "
            "and get /v1/jobs/{id}/events.",
            "stream",
        )


def _check_stream(fields: ImageGenerationRequest) -> None:
    if fields.n is not None and fields.n > 1:
        raise InvalidRequest(
            f"The parameter 'n' must be 1 with 'stream'; given {describe(fields.n)}. "
            "Make several calls.",
            "n",
        )
    if fields.response_format == "url":
        raise InvalidRequest(
            "The parameter 'response_format' is 'url', but events carry the image itself; leave "
            "it out, or leave 'stream' out.",
            "response_format",
        )


def _idempotency_key(request: Request) -> str | None:
    all_given = request.headers.getlist(IDEMPOTENCY_KEY)
    if not all_given:
        return None
    if len(all_given) > 1:
        raise InvalidRequest(
            f"The header {IDEMPOTENCY_KEY!r} names a call once; given {len(all_given)} times. "
            "Leave one.",
            IDEMPOTENCY_KEY,
        )
    [given] = all_given
    if not (0 < len(given) <= MAX_KEY_CHARS and given.isascii() and given.isprintable()):
        raise InvalidRequest(
            f"The header {IDEMPOTENCY_KEY!r} must have 1 to {MAX_KEY_CHARS} printable ASCII "
            f"characters; given {len(given)}: {describe(given)}.",
            IDEMPOTENCY_KEY,
        )
    return given


def _digest(body: dict[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
