"""From the body of a call to image requests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from starlette.requests import Request

from ray_cluster.api.access.auth import caller_of, check_priority, owner_of
from ray_cluster.api.access.middleware import request_id_of
from ray_cluster.api.catalog import Catalog
from ray_cluster.api.input.bounded_body import (
    BodyLimit,
    BodyMemory,
    announced_bytes,
    read_object,
    too_large,
)
from ray_cluster.api.input.multipart import is_form
from ray_cluster.api.input.schemas import (
    REFUSED,
    ImageEditRequest,
    ImageGenerationRequest,
    ImageVariationRequest,
)
from ray_cluster.api.input.sent_images import SentImages, has_images, take_image_texts
from ray_cluster.api.input.strict_json import typed_texts
from ray_cluster.api.input.validation import describe, validate, validate_as
from ray_cluster.api.resolve.cascades import CascadeResolver
from ray_cluster.api.resolve.controlnet_choices import FIELD as CONTROLNETS
from ray_cluster.api.resolve.controlnet_choices import SentControl, take_control_images
from ray_cluster.api.resolve.controlnets import ControlNets
from ray_cluster.api.resolve.edits import EditImages, WantedImages
from ray_cluster.api.resolve.loras import LoraResolver
from ray_cluster.api.resolve.prompts import PromptCheck
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.errors import InvalidRequest
from ray_cluster.requests import ImageRequest

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARS = 255
# of all images in one reply: four bytes of base64 each, and Ray's messages end at 256 MiB
MAX_INLINE_PIXELS = 48_000_000
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


class _Wanted(NamedTuple):
    """What a call asks for, its images in the input store: those that it edits, and maps'."""

    fields: ImageGenerationRequest
    images: EditImages | None
    controls: tuple[SentControl, ...]


class CallReader:
    """Reads and checks the bodies of calls for images, which their endpoints share with jobs."""

    def __init__(
        self,
        catalog: Catalog,
        prompts: PromptCheck,
        loras: LoraResolver,
        controls: ControlNets,
        *,
        settings: CurrentSettings,
        images: SentImages,
        memory: BodyMemory,
    ) -> None:
        self._catalog = catalog
        self._loras = loras
        self._controls = controls
        self._prompts = prompts
        self._cascades = CascadeResolver(catalog, prompts)
        self._settings = settings
        self._images = images
        self._memory = memory

    async def read(self, request: Request) -> Call:
        """Return what a call for images from text asks for.

        Raises:
            ApiError: the body is no JSON object in bounds, or there is no such model.
            InvalidRequest: a parameter is wrong.
        """
        key = _idempotency_key(request)
        limits = self._settings.limits
        limit = self._limit(request, may_have_image=bool(self._settings.controlnets))
        with self._memory.share(request, limit, limits) as take:
            body = await read_object(request, limit, take=take)
            return await self._from_text(request, body, key, is_job=False)

    async def read_edit(
        self, request: Request, kind: type[ImageEditRequest] = ImageEditRequest
    ) -> Call:
        """Return what a call that edits an image asks for, in a form or in JSON.

        Args:
            kind: of its fields.

        Raises:
            ApiError: the body is neither in bounds, the images cannot be stored, or there is no
                such model.
            InvalidRequest: a parameter or an image is wrong.
        """
        key = _idempotency_key(request)
        if is_form(request):
            return await self._from_form(request, kind, key, is_job=False)
        limits = self._settings.limits
        limit = BodyLimit.of_uploads(limits)
        with self._memory.share(request, limit, limits) as take:
            body = await read_object(request, limit, may_be_form=True, take=take)
            return await self._from_image(request, body, kind, key, is_job=False)

    async def read_job(self, request: Request) -> Call:
        """Return what a job is to make: an edit, in a form or in JSON with an image, or an image
        from text. Errors are those of the other calls.
        """
        key = _idempotency_key(request)
        if is_form(request):
            return await self._from_form(request, ImageEditRequest, key, is_job=True)
        limits = self._settings.limits
        limit = self._limit(request, may_have_image=True)
        with self._memory.share(request, limit, limits) as take:
            body = await read_object(request, limit, may_be_form=True, take=take)
            if has_images(body):
                return await self._from_image(request, body, ImageEditRequest, key, is_job=True)
            return await self._from_text(request, body, key, is_job=True)

    def _limit(self, request: Request, *, may_have_image: bool) -> BodyLimit:
        """Return the limit of a JSON body that may hold images, and may hold none."""
        limits = self._settings.limits
        own = BodyLimit.of_json(limits)
        # images make it large, and a body of unknown length is not read on the off-chance
        is_large = may_have_image and announced_bytes(request) > own.max_bytes
        return BodyLimit.of_uploads(limits) if is_large else own

    async def _from_text(
        self, request: Request, body: dict[str, Any], key: str | None, *, is_job: bool
    ) -> Call:
        images = take_control_images(body)
        own = BodyLimit.of_json(self._settings.limits)
        if announced_bytes(request) > own.max_bytes and not any(images):
            raise too_large(own)
        fields = validate(body)
        _check_delivery(fields, is_job=is_job)
        controls = await self._controls.read(request, fields, images)
        wanted = _Wanted(fields, None, controls)
        requests = await self._resolved(request, wanted, key, is_job=is_job)
        return Call(fields, requests, _digest(body | _digests_of(controls)), key)

    async def _from_form(
        self, request: Request, kind: type[ImageEditRequest], key: str | None, *, is_job: bool
    ) -> Call:
        form = await self._images.read_form(request, self._settings.limits, kind)
        body = typed_texts(form.texts, kind)
        control_images = take_control_images(body)
        fields = validate_as(kind, body, REFUSED)
        _check_delivery(fields, is_job=is_job)
        controls = await self._controls.read(request, fields, control_images, form.files)
        images = await self._images.check(request, form.image, form.mask, self._settings.limits)
        return await self._edit(request, _Wanted(fields, images, controls), key, is_job=is_job)

    async def _from_image(
        self,
        request: Request,
        body: dict[str, Any],
        kind: type[ImageEditRequest],
        key: str | None,
        *,
        is_job: bool,
    ) -> Call:
        texts = take_image_texts(body, has_mask="mask" in kind.image_fields)
        control_images = take_control_images(body)
        fields = validate_as(kind, body, REFUSED)
        _check_delivery(fields, is_job=is_job)
        controls = await self._controls.read(request, fields, control_images)
        image, mask = await self._images.store(request, texts, self._settings.limits)
        images = await self._images.check(request, image, mask, self._settings.limits)
        return await self._edit(request, _Wanted(fields, images, controls), key, is_job=is_job)

    async def _edit(
        self, request: Request, wanted: _Wanted, key: str | None, *, is_job: bool
    ) -> Call:
        requests = await self._resolved(request, wanted, key, is_job=is_job)
        fields, images = wanted.fields, wanted.images
        assert images is not None, "an edit has an image"
        # a form and JSON of the same content are the same call
        body = fields.model_dump(mode="json", exclude_none=True) | {"image": images.image.sha256}
        if images.mask is not None:
            body["mask"] = images.mask.sha256
        body |= _digests_of(wanted.controls)
        if isinstance(fields, ImageVariationRequest):
            # with a text, its fields may be those of an edit, which is another call
            body["kind"] = "variation"
        return Call(fields, requests, _digest(body), key, "image_edit")

    async def _resolved(
        self,
        request: Request,
        given: _Wanted,
        key: str | None,
        *,
        is_job: bool,
    ) -> tuple[ImageRequest, ...]:
        limits, fields = self._settings.limits, given.fields
        check_priority(request, fields.priority)
        is_stored = is_job or key is not None or fields.response_format == "url"
        fields, loras = await self._loras.resolve(fields)
        wanted = WantedImages(fields, given.images, is_stored, loras, given.controls)
        cascade = self._settings.cascade(fields.model)
        if cascade is not None:
            requests = await self._cascades.resolve(wanted, cascade, limits)
        else:
            profile = await self._catalog.profile(fields.model)
            requests = wanted.of(profile, limits)
            await self._prompts.check(fields, profile)
        if not is_job and fields.response_format != "url":
            _check_inline(requests)
        requests = await self._controls.with_maps(request, requests, given.controls)
        call_id = request_id_of(request)
        owner, caller = owner_of(request), caller_of(request)
        return tuple(replace(one, call_id=call_id, owner=owner, caller=caller) for one in requests)


def _digests_of(controls: Sequence[SentControl]) -> dict[str, Any]:
    """Return what of a body tells calls apart by the images of their ControlNets."""
    return {CONTROLNETS: [one.as_in_body() for one in controls]} if controls else {}


def _check_delivery(fields: ImageGenerationRequest, *, is_job: bool) -> None:
    """Refuse ways of getting the images that the call does not have, or that exclude each other."""
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


def _check_inline(requests: Sequence[ImageRequest]) -> None:
    """Refuse images that would be made, and then not fit into the reply."""
    sizes = [one.output_px for one in requests]
    num_pixels = sum(width * height for width, height in sizes)
    if num_pixels > MAX_INLINE_PIXELS:
        raise InvalidRequest(
            "The reply would hold {} images of {}x{}, {:.0f} million pixels; it can hold {:.0f} "
            "million. Set 'response_format' to 'url', send a job, or ask for fewer images.".format(
                len(sizes), *sizes[0], num_pixels / 1e6, MAX_INLINE_PIXELS / 1e6
            ),
            "response_format",
            "reply_too_large",
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
