"""The images that calls send: stored, and decoded once before anything is promised."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request

from ray_cluster.api.auth import owner_of
from ray_cluster.api.edits import EditImages
from ray_cluster.api.errors import ApiError, unavailable
from ray_cluster.api.schema import MAX_INPUT_IMAGES
from ray_cluster.api.uploads import Uploads
from ray_cluster.api.validate import describe, refused
from ray_cluster.config.sections import LimitsConfig
from ray_cluster.errors import MODEL_ERRORS, InvalidRequest, RequestFailed
from ray_cluster.imaging.templates import ImageFacts, MaskFacts
from ray_cluster.requests import BlobRef
from ray_cluster.storage.blob_store import BlobStoreError
from ray_cluster.storage.inputs import InputStore

logger = logging.getLogger(__name__)

_CHECK_ERRORS: tuple[type[Exception], ...] = (RequestFailed, *MODEL_ERRORS)
_IMAGE_FIELDS = ("image", "images", "mask")


class ImageChecks(Protocol):
    """The part of an :class:`~ray_cluster.imaging.image_coder.ImageCoder` that is used here."""

    def image_facts(self, data: bytes, param: str, max_pixels: int) -> Future[ImageFacts]: ...

    def mask_facts(self, data: bytes, param: str, max_pixels: int) -> Future[MaskFacts]: ...


class ImageTexts(NamedTuple):
    """The images of a JSON body, in base64 or as ``data:`` URLs.

    Attributes:
        param: the field that the image is in, for errors.
    """

    image: str
    mask: str | None
    param: str


class SentImages:
    """Reads the images of calls, which gateways never decode themselves.

    Args:
        inputs: where they are kept.
        checks: decodes them in other processes.
    """

    def __init__(self, inputs: InputStore, checks: ImageChecks) -> None:
        self._inputs = inputs
        self._checks = checks

    async def read_form(
        self, request: Request, limits: LimitsConfig, *, has_mask: bool
    ) -> tuple[dict[str, str], BlobRef, BlobRef | None]:
        """Read a form; return its texts by name, its image and its mask.

        Args:
            has_mask: whether it may have one.

        Raises:
            ApiError, InvalidRequest: see :meth:`Uploads.read_form`; or it has no image.
        """
        most = {"image": MAX_INPUT_IMAGES, "mask": 1}
        form = await Uploads(self._inputs, limits).read_form(request, most)
        if not form.images.get("image"):
            raise _no_image()
        [image] = form.images["image"]
        mask = form.images.get("mask", (None,))[0]
        if mask is not None and not has_mask:
            raise _no_mask()
        return form.texts, image, mask

    async def store(
        self, request: Request, texts: ImageTexts, limits: LimitsConfig
    ) -> tuple[BlobRef, BlobRef | None]:
        """Store the images of a JSON body; errors are those of :meth:`Uploads.store_text`."""
        uploads, owner = Uploads(self._inputs, limits), owner_of(request)
        image = await uploads.store_text(owner, texts.image, texts.param)
        mask = None
        if texts.mask is not None:
            mask = await uploads.store_text(owner, texts.mask, "mask")
        return image, mask

    async def check(
        self, request: Request, image: BlobRef, mask: BlobRef | None, limits: LimitsConfig
    ) -> EditImages:
        """Decode the images and return what they are.

        Raises:
            ApiError: 503 where the input store fails, or there is nothing to decode them.
            InvalidRequest: one of them cannot be decoded, has too many pixels or several frames;
                the mask has no alpha, or leaves nothing to edit.
        """
        owner, most = owner_of(request), limits.max_input_pixels
        data = await self._fetch(owner, image)
        try:
            checking = self._checks.image_facts(data, "image", most)
            image_facts = await asyncio.wrap_future(checking)
            if mask is None:
                return EditImages(image, image_facts)
            masking = self._checks.mask_facts(await self._fetch(owner, mask), "mask", most)
            found: MaskFacts = await asyncio.wrap_future(masking)
            return EditImages(image, image_facts, mask, found)
        except _CHECK_ERRORS as error:
            logger.error("an image that a client sends is not checked: %r", error)
            raise unavailable(
                "The processes that check images do not answer; try again.", "checks_unavailable"
            ) from error

    async def _fetch(self, owner: str, ref: BlobRef) -> bytes:
        try:
            data = await asyncio.to_thread(self._inputs.get, owner, ref)
        except BlobStoreError as error:
            raise _store_fails() from error
        if data is None:
            # it was stored a moment ago
            raise _store_fails()
        return data


def has_images(body: Mapping[str, Any]) -> bool:
    """Whether a JSON body is that of an edit."""
    return body.get("image") is not None or body.get("images") is not None


def take_image_texts(body: dict[str, Any], *, has_mask: bool) -> ImageTexts:
    """Take the images out of a JSON body, in either spelling, and return them.

    Args:
        has_mask: whether it may have one.

    Raises:
        InvalidRequest: there is none, there are too many, or one is not a text.
    """
    given = {name: body.pop(name, None) for name in _IMAGE_FIELDS}
    image, images, mask = (given[name] for name in _IMAGE_FIELDS)
    if image is not None and images is not None:
        raise InvalidRequest(
            "The parameters 'image' and 'images' say the same; leave one of them out.", "images"
        )
    name = "image" if images is None else "images"
    several = given[name]
    if several is None:
        raise _no_image()
    if not isinstance(several, list):
        several = [several]
    if not several:
        raise _no_image()
    if len(several) > MAX_INPUT_IMAGES:
        raise InvalidRequest(
            f"The parameter {name!r} holds {len(several)} images; an edit takes "
            f"{MAX_INPUT_IMAGES}. Send one.",
            name,
        )
    if mask is not None and not has_mask:
        raise _no_mask()
    text = None if mask is None else _text(mask, "mask")
    return ImageTexts(_text(several[0], name), text, name)


def _text(value: object, name: str) -> str:
    """Return an image's text: itself, or in OpenAI's object around it."""
    if isinstance(value, dict):
        if "file_id" in value:
            raise InvalidRequest(
                f"The parameter {name!r} names a file, and this service keeps none. Send the image "
                "itself in base64.",
                name,
            )
        unknown = [key for key in value if key != "image_url"]
        if unknown or "image_url" not in value:
            raise InvalidRequest(
                f"The parameter {name!r} must be base64, a data URL, or an object with "
                f"'image_url' alone; given an object with {describe(', '.join(map(str, value)))}.",
                name,
            )
        value = value["image_url"]
    if not isinstance(value, str):
        raise InvalidRequest(
            f"The parameter {name!r} must be base64 or a data URL; given {describe(value)}.",
            name,
            "invalid_type",
        )
    return value


def _no_image() -> InvalidRequest:
    return InvalidRequest(
        "The parameter 'image' is required: send the image to edit. For images from text alone use "
        "/v1/images/generations.",
        "image",
        "missing_required_parameter",
    )


def _no_mask() -> InvalidRequest:
    return refused("mask", "Variations have none; an edit of a part goes to /v1/images/edits.")


def _store_fails() -> ApiError:
    return unavailable(
        "The store of images that calls send does not answer; try again.",
        "input_store_unavailable",
    )
