"""From the body of a call to image requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request

from ray_cluster.api.advice import REFUSED, wrong
from ray_cluster.api.input.bounded_body import BodyLimit, announced_bytes, read_object, too_large
from ray_cluster.api.input.multipart import is_form
from ray_cluster.api.input.schemas import (
    ImageEditRequest,
    ImageGenerationRequest,
    ImageVariationRequest,
)
from ray_cluster.api.input.sent_images import SentCall, SentImages, take_images
from ray_cluster.api.input.validation import describe, validate, validate_as
from ray_cluster.api.resolve.controlnets import ControlNets
from ray_cluster.api.resolve.resolver import RequestResolver, WantedImages
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.config.loading import Document
from ray_cluster.requests import ImageRequest

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARS = 255
EventKind = Literal["image_generation", "image_edit"]


@dataclass(frozen=True, slots=True)
class Call:
    """A valid call.

    Attributes:
        requests: one per image.
        body_digest: equal for equal bodies, however they are written.
        idempotency_key: the client's name for the call; None without one.
        event_kind: what the events of its stream are called.
    """

    fields: ImageGenerationRequest
    requests: tuple[ImageRequest, ...]
    body_digest: str
    idempotency_key: str | None
    event_kind: EventKind = "image_generation"


@dataclass(frozen=True, slots=True)
class CallKind:
    """What the body of a call may be.

    Attributes:
        edit: its fields with an image; None where no image is edited.
        has_text: whether it may be an image from text.
    """

    edit: type[ImageEditRequest] | None
    has_text: bool
    is_job: bool = False


GENERATION = CallKind(None, has_text=True)
EDIT = CallKind(ImageEditRequest, has_text=False)
VARIATION = CallKind(ImageVariationRequest, has_text=False)
JOB = CallKind(ImageEditRequest, has_text=True, is_job=True)


class CallReader:
    """Reads and checks the bodies of calls for images, which their endpoints share with jobs."""

    def __init__(
        self,
        resolver: RequestResolver,
        controlnets: ControlNets,
        *,
        settings: CurrentSettings,
        images: SentImages,
    ) -> None:
        self._resolver = resolver
        self._controlnets = controlnets
        self._settings = settings
        self._images = images

    async def read(self, request: Request, kind: CallKind) -> Call:
        """Return what a call asks for: an edit in a form or in JSON, or an image from text.

        Raises:
            ApiError: the body is neither in bounds, the images cannot be stored, or there is no
                such model.
            InvalidRequest: a parameter or an image is wrong.
        """
        key, document = _idempotency_key(request), self._settings.document()
        async with self._sent(request, kind, document) as sent:
            if kind.edit is None or not sent.images:
                fields = validate(sent.body)
            else:
                fields = validate_as(kind.edit, sent.body, REFUSED)
            _check_delivery(fields, is_job=kind.is_job)
            controlnets = await self._controlnets.read(request, fields, sent, document)
            images = None
            if sent.images:
                await self._resolver.check_number(fields, len(sent.images), sent.param, document)
                images = await self._images.of_edit(request, sent, document.limits)
            is_inline = not kind.is_job and fields.response_format != "url"
            is_stored = not is_inline or key is not None
            wanted = WantedImages(fields, images, is_stored, controlnets=controlnets)
            requests = await self._resolver.resolve(request, wanted, document, is_inline=is_inline)
            event_kind: EventKind = "image_generation" if images is None else "image_edit"
            return Call(fields, requests, _digest(sent.body, wanted), key, event_kind)

    @asynccontextmanager
    async def _sent(
        self, request: Request, kind: CallKind, document: Document
    ) -> AsyncIterator[SentCall]:
        """Give the body of a call; JSON counts as being read until the end of the block."""
        limits = document.limits
        if kind.edit is not None and is_form(request):
            yield await self._images.read_form(request, limits, kind.edit)
            return
        own, memory = BodyLimit.of_json(limits), self._images.memory
        # images make it large, and a body of unknown length is not read on the off-chance
        is_large = announced_bytes(request) > own.max_bytes
        may_have_image = kind.edit is not None or bool(document.controlnets)
        may_be_large = not kind.has_text or (may_have_image and is_large)
        limit = BodyLimit.of_uploads(limits) if may_be_large else own
        with memory.share(request, limit, limits) as take:
            body = await read_object(request, limit, may_be_form=kind.edit is not None, take=take)
            names = ("image", "images")
            is_edit = not kind.has_text or any(body.get(name) is not None for name in names)
            fields = ImageGenerationRequest if kind.edit is None or not is_edit else kind.edit
            sent = take_images(body, fields)
            if is_large and not sent.images and not any(sent.controlnet_images):
                raise too_large(own)
            yield sent


def _check_delivery(fields: ImageGenerationRequest, *, is_job: bool) -> None:
    """Refuse ways of getting the images that the call does not have, or that exclude each other."""
    given = fields.response_format
    if is_job:
        if given == "b64_json":
            what = "is 'b64_json', but the images of a job are fetched from its urls"
            raise wrong("response_format", what, "job urls")
        if fields.stream:
            raise wrong("stream", "is true, but a job has its events elsewhere", "job events")
    elif fields.stream:
        if fields.n is not None and fields.n > 1:
            what = f"must be 1 with 'stream'; given {describe(fields.n)}"
            raise wrong("n", what, "ask for less")
        if given == "url":
            what = "is 'url', but events carry the image itself"
            raise wrong("response_format", what, "no url")
    elif fields.partial_images:
        what = f"is {fields.partial_images}, which changes nothing without 'stream'"
        raise wrong("partial_images", f"{what}: previews come as events", "stream")


def _idempotency_key(request: Request) -> str | None:
    all_given = request.headers.getlist(IDEMPOTENCY_KEY)
    if not all_given:
        return None
    [given, *others] = all_given
    if others:
        raise wrong(IDEMPOTENCY_KEY, f"is given {len(all_given)} times", "once")
    if not (0 < len(given) <= MAX_KEY_CHARS and given.isascii() and given.isprintable()):
        what = f"must have 1 to {MAX_KEY_CHARS} printable ASCII characters"
        raise wrong(IDEMPOTENCY_KEY, f"{what}; given {len(given)}: {describe(given)}")
    return given


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without what is null, which is the same as absent."""
    if isinstance(value, dict):
        return {k: _without_nulls(one) for k, one in value.items() if one is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _digest(sent: dict[str, Any], wanted: WantedImages) -> str:
    """Return what equal bodies share, however they are written."""
    fields, images, body = wanted.fields, wanted.images, _without_nulls(sent)
    if images is not None:
        # a form and JSON of the same content are the same call
        digests = [one.ref.sha256 for one in images.pictures]
        own = {"images": digests} if images.more else {"image": digests[0]}
        body = fields.model_dump(mode="json", exclude_none=True) | own
        if images.mask is not None:
            body["mask"] = images.mask.sha256
        if isinstance(fields, ImageVariationRequest):
            # with a text, its fields may be those of an edit, which is another call
            body["kind"] = "variation"
    if wanted.controlnets:
        body["controlnets"] = [one.as_in_body() for one in wanted.controlnets]
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
