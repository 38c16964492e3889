"""The images that calls send: stored, and decoded once before anything is promised."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from starlette.requests import Request

from ray_cluster.api.access.auth import caller_of, owner_of
from ray_cluster.api.errors import unavailable
from ray_cluster.api.input.bounded_body import BodyMemory
from ray_cluster.api.input.controlnet_schema import MAX_CONTROLS
from ray_cluster.api.input.file_ids import FILE_PREFIX
from ray_cluster.api.input.form_reader import MoreFiles, Uploads, once, store_fails
from ray_cluster.api.input.image_store import ClientInputs, StoredBytes
from ray_cluster.api.input.schemas import MAX_INPUT_IMAGES, ImageEditRequest
from ray_cluster.api.input.validation import describe, refused
from ray_cluster.api.resolve.edits import EditImages
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.errors import MODEL_ERRORS, InvalidRequest, RequestFailed
from ray_cluster.imaging.controlnet_maps import ControlMap, MapOrder
from ray_cluster.imaging.detectors import Detectors
from ray_cluster.imaging.processes.fair_queue import QueueFull
from ray_cluster.imaging.processes.image_coder import Source
from ray_cluster.imaging.templates import ImageFacts, MaskFacts
from ray_cluster.requests import BlobRef
from ray_cluster.storage.blob_store import BlobStoreError
from ray_cluster.storage.inputs import InputStore

logger = logging.getLogger(__name__)

_CHECK_ERRORS: tuple[type[Exception], ...] = (RequestFailed, *MODEL_ERRORS)
_IMAGE_FIELDS = ("image", "images", "mask")
# of OpenAI's object around an image
_OBJECT_KEYS = ({"image_url"}, {"file_id"})

T = TypeVar("T")
P = ParamSpec("P")


class ImageChecks(Protocol):
    """The part of an :class:`~ray_cluster.imaging.processes.image_coder.ImageCoder` that is used
    here."""

    def image_facts(
        self, data: Source, param: str, max_pixels: int, client: str
    ) -> Future[ImageFacts]: ...

    def mask_facts(
        self, data: Source, param: str, max_pixels: int, client: str
    ) -> Future[MaskFacts]: ...

    def control_map(
        self, data: Source, order: MapOrder, max_pixels: int, client: str
    ) -> Future[ControlMap]: ...


class ImageTexts(NamedTuple):
    """The images of a JSON body, in base64 or as ``data:`` URLs.

    Attributes:
        param: the field that the image is in, for errors.
    """

    image: str
    mask: str | None
    param: str


class EditForm(NamedTuple):
    """What the form of an edit held.

    Attributes:
        texts: by name.
        files: further images, by the names of their parts.
    """

    texts: dict[str, str]
    image: BlobRef
    mask: BlobRef | None
    files: dict[str, BlobRef]


class MadeMap(NamedTuple):
    """A ControlNet's map, in the input store."""

    ref: BlobRef
    made: ControlMap


class SentImages:
    """Reads the images of calls, which gateways never decode themselves.

    Args:
        inputs: where they are kept.
        checks: decodes them in other processes.
        detectors: those that make maps there.

    Attributes:
        memory: bounds what the bodies hold that are being read.
    """

    def __init__(
        self, inputs: InputStore, checks: ImageChecks, detectors: Detectors | None = None
    ) -> None:
        self._inputs = inputs
        self._checks = checks
        self.detectors = detectors or Detectors()
        self.memory = BodyMemory()
        self._stored = StoredBytes(inputs.grace_s)

    async def read_form(
        self, request: Request, limits: LimitsConfig, kind: type[ImageEditRequest]
    ) -> EditForm:
        """Read the form of an edit.

        Args:
            kind: of its fields.

        Raises:
            ApiError, InvalidRequest: see :meth:`Uploads.read_form`; or it has no image.
        """
        most = {"image": MAX_INPUT_IMAGES, "mask": 1}
        more = MoreFiles(MAX_CONTROLS, frozenset(kind.model_fields))
        with self.memory.form(request):
            form = await self._uploads(request, limits).read_form(request, most, more)
        if not form.images.get("image"):
            raise _no_image()
        [image] = form.images["image"]
        mask = form.images.get("mask", (None,))[0]
        if mask is not None and "mask" not in kind.image_fields:
            raise _no_mask()
        return EditForm(form.texts, image, mask, form.files)

    async def read_one(
        self, request: Request, name: str, limits: LimitsConfig
    ) -> tuple[dict[str, str], BlobRef]:
        """Read a form that holds one image, of that name; return its texts and the image.

        Raises:
            ApiError, InvalidRequest: see :meth:`Uploads.read_form`; or it has no image.
        """
        with self.memory.form(request):
            form = await self._uploads(request, limits).read_form(request, {name: 1})
        if not form.images.get(name):
            raise no_file(name)
        [image] = form.images[name]
        return form.texts, image

    async def check_one(
        self, request: Request, image: BlobRef, param: str, limits: LimitsConfig
    ) -> ImageFacts:
        """Decode a stored image and return what it is; errors are those of :meth:`check`."""
        data, most = self._fetch_of(request, image), limits.max_input_pixels
        return await _answer(self._checks.image_facts, data, param, most, caller_of(request))

    async def sent_s(self, request: Request, image: BlobRef) -> float | None:
        """Return when a client has sent an image, in Unix time; None if it is not there (any more).

        Raises:
            ApiError: 503 where the input store fails.
        """
        try:
            return await asyncio.to_thread(self._inputs.sent_s, owner_of(request), image)
        except BlobStoreError as error:
            raise store_fails(error) from error

    @property
    def grace_s(self) -> float:
        """Seconds for which what is sent is kept at least."""
        return self._inputs.grace_s

    async def store(
        self, request: Request, texts: ImageTexts, limits: LimitsConfig
    ) -> tuple[BlobRef, BlobRef | None]:
        """Store the images of a JSON body; errors are those of :meth:`Uploads.store_text`."""
        image = await self.store_one(request, texts.image, texts.param, limits)
        mask = None
        if texts.mask is not None:
            mask = await self.store_one(request, texts.mask, "mask", limits)
        return image, mask

    async def store_one(
        self, request: Request, text: str, param: str, limits: LimitsConfig
    ) -> BlobRef:
        """Store an image of a JSON body; errors are those of :meth:`Uploads.store_text`."""
        uploads = self._uploads(request, limits)
        return await uploads.store_text(owner_of(request), text, param)

    async def check(
        self, request: Request, image: BlobRef, mask: BlobRef | None, limits: LimitsConfig
    ) -> EditImages:
        """Decode the images and return what they are.

        Raises:
            ApiError: 503 where the input store fails, or there is nothing to decode them.
            InvalidRequest: one of them cannot be decoded, has too many pixels or several frames;
                the mask has no alpha, or leaves nothing to edit.
        """
        image_facts = await self.check_one(request, image, "image", limits)
        if mask is None:
            return EditImages(image, image_facts)
        data, most = self._fetch_of(request, mask), limits.max_input_pixels
        client = caller_of(request)
        mask_facts = await _answer(self._checks.mask_facts, data, "mask", most, client)
        return EditImages(image, image_facts, mask, mask_facts)

    async def make_map(
        self, request: Request, image: BlobRef, order: MapOrder, limits: LimitsConfig
    ) -> MadeMap:
        """Have a ControlNet's map made of a stored image, and store it.

        Raises:
            ApiError: 503 where the input store fails, or there is nothing to decode the image.
            InvalidRequest: it cannot be decoded, has too many pixels or several frames; or the
                detector cannot be run.
        """
        data, most = self._fetch_of(request, image), limits.max_input_pixels
        order = replace(order, folder=self.detectors.folder)
        made = await _answer(self._checks.control_map, data, order, most, caller_of(request))
        try:
            ref = await self._inputs_of(request, limits).put(
                owner_of(request), once(made.png), max_bytes=len(made.png)
            )
        except BlobStoreError as error:
            raise store_fails(error) from error
        return MadeMap(ref, made)

    def _uploads(self, request: Request, limits: LimitsConfig) -> Uploads:
        return Uploads(self._inputs_of(request, limits), limits)

    def _inputs_of(self, request: Request, limits: LimitsConfig) -> ClientInputs:
        most = limits.max_stored_bytes_per_client
        return ClientInputs(self._inputs, self._stored, caller_of(request), most)

    def _fetch_of(self, request: Request, ref: BlobRef) -> Source:
        """Return what fetches a stored image: those that wait for their check take no memory."""
        owner = owner_of(request)

        def fetch() -> bytes:
            data = self._inputs.get(owner, ref)
            if data is None:
                raise BlobStoreError("an image is gone that was stored a moment ago")
            return data

        return fetch


async def _answer(submit: Callable[P, Future[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a coder's job returns; raises :class:`ApiError` 503 where it has no answer."""
    try:
        return await asyncio.wrap_future(submit(*args, **kwargs))
    except QueueFull as error:
        raise unavailable(
            "Too many images of yours wait to be checked at this gateway; let calls that send "
            "images end, then try again.",
            "too_many_checks",
        ) from error
    except BlobStoreError as error:
        raise store_fails(error) from error
    except _CHECK_ERRORS as error:
        logger.error("an image that a client sends is not checked: %r", error)
        raise unavailable(
            "The processes that check images do not answer; try again.", "checks_unavailable"
        ) from error


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
    text = None if mask is None else image_text(mask, "mask")
    return ImageTexts(image_text(several[0], name), text, name)


def image_text(value: object, name: str) -> str:
    """Return an image's text: itself, or in OpenAI's object around it.

    Raises:
        InvalidRequest: it is neither; names ``name``.
    """
    if isinstance(value, dict):
        if set(value) not in _OBJECT_KEYS:
            raise InvalidRequest(
                f"The parameter {name!r} must be base64, a data URL, the id of an uploaded file, "
                "or an object with 'image_url' or 'file_id' alone; given an object with "
                f"{describe(', '.join(map(str, value)))}.",
                name,
            )
        [(key, value)] = value.items()
        if key == "file_id" and not (isinstance(value, str) and value.startswith(FILE_PREFIX)):
            raise InvalidRequest(
                f"The parameter {name!r} has a 'file_id' that is no id of a file: "
                f"{describe(value)}. POST /v1/files returns ids; they begin with {FILE_PREFIX!r}.",
                name,
            )
    if not isinstance(value, str):
        raise InvalidRequest(
            f"The parameter {name!r} must be base64, a data URL or the id of an uploaded file; "
            f"given {describe(value)}.",
            name,
            "invalid_type",
        )
    return value


def no_file(name: str) -> InvalidRequest:
    """Return the error of a call whose one image is missing."""
    return InvalidRequest(
        f"The parameter {name!r} is required: send an image, of a form as a file (with curl: -F "
        f"{name}=@photo.png).",
        name,
        "missing_required_parameter",
    )


def _no_image() -> InvalidRequest:
    return InvalidRequest(
        "The parameter 'image' is required: send the image to edit. For images from text alone use "
        "/v1/images/generations.",
        "image",
        "missing_required_parameter",
    )


def _no_mask() -> InvalidRequest:
    return refused("mask", "Variations have none; an edit of a part goes to /v1/images/edits.")
