"""The images that calls send: stored, and decoded once before anything is promised."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from starlette.requests import Request

from ray_cluster.api.access.auth import caller_of, owner_of
from ray_cluster.api.advice import REFUSED_MASK, missing, refused, wrong
from ray_cluster.api.errors import unavailable
from ray_cluster.api.input.bounded_body import BodyMemory
from ray_cluster.api.input.form_reader import MoreFiles, Uploads, once
from ray_cluster.api.input.image_store import FILE_PREFIX, ClientInputs, StoredBytes
from ray_cluster.api.input.schemas import (
    MAX_CONTROLNETS,
    ImageEditRequest,
    ImageGenerationRequest,
)
from ray_cluster.api.input.strict_json import typed_texts
from ray_cluster.api.input.validation import describe
from ray_cluster.config.sections.cell_wide import LimitsConfig
from ray_cluster.errors import MODEL_ERRORS, InvalidRequest, RequestFailed
from ray_cluster.imaging.controlnet_maps import ControlMap, MapOrder
from ray_cluster.imaging.detectors import Detectors
from ray_cluster.imaging.edit_images import ImageFacts, MaskFacts
from ray_cluster.imaging.processes.fair_queue import QueueFull
from ray_cluster.imaging.processes.image_coder import Source
from ray_cluster.requests import BlobRef
from ray_cluster.storage.inputs import InputStore

logger = logging.getLogger(__name__)

_CHECK_ERRORS: tuple[type[Exception], ...] = (RequestFailed, *MODEL_ERRORS)
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


@dataclass(frozen=True, slots=True)
class SentCall:
    """The body of a call, its images apart.

    Attributes:
        body: the values of its fields.
        controlnet_images: of its ControlNets, None where there is none.
        images: of an edit: texts of JSON, or what a form held, in the input store.
        param: the field that they are in, for errors.
        files: further images of a form, by the names of their parts; None for JSON.
    """

    body: dict[str, Any]
    controlnet_images: list[object]
    images: tuple[str | BlobRef, ...] = ()
    mask: str | BlobRef | None = None
    param: str = "image"
    files: dict[str, BlobRef] | None = None

    def param_of(self, index: int) -> str:
        """Return how errors name one of the images."""
        return self.param if len(self.images) == 1 else f"{self.param}[{index}]"


class MadeMap(NamedTuple):
    """A ControlNet's map, in the input store."""

    ref: BlobRef
    made: ControlMap


class Picture(NamedTuple):
    """An image in the input store, and what it is."""

    ref: BlobRef
    facts: ImageFacts

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height."""
        return (self.facts.width_px, self.facts.height_px)


@dataclass(frozen=True, slots=True)
class CheckedImages:
    """The images of a call that edits, in the input store and checked.

    Attributes:
        mask: of the first image; None for an edit of everything.
        more: images beside the first.
        param: what the call calls them.
    """

    image: BlobRef
    image_facts: ImageFacts
    mask: BlobRef | None = None
    mask_facts: MaskFacts | None = None
    more: tuple[Picture, ...] = ()
    param: str = "image"

    def param_of(self, index: int) -> str:
        """Return how errors name one of the images."""
        return f"{self.param}[{index}]" if self.more else "image"

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """All but the mask, in their order."""
        return (Picture(self.image, self.image_facts), *self.more)

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height of the first image."""
        return (self.image_facts.width_px, self.image_facts.height_px)


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
    ) -> SentCall:
        """Read the form of an edit; its images are stored while they arrive.

        Args:
            kind: of its fields.

        Raises:
            ApiError, InvalidRequest: see :meth:`Uploads.read_form`; or it has no image.
        """
        most = {"image": kind.max_images, "mask": 1}
        more = MoreFiles(MAX_CONTROLNETS, frozenset(kind.model_fields))
        with self.memory.form(request):
            form = await self._uploads(request, limits).read_form(request, most, more)
        if not form.images.get("image"):
            raise _no_image()
        mask = form.images.get("mask", (None,))[0]
        if mask is not None and "mask" not in kind.image_fields:
            raise refused("mask", REFUSED_MASK)
        body = typed_texts(form.texts, kind)
        given, controls = form.images["image"], _take_controlnet_images(body)
        return SentCall(body, controls, given, mask, files=form.files)

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
        """Decode a stored image and return what it is; errors are those of :meth:`of_edit`."""
        data, most = self._source(request, image, limits), limits.max_input_pixels
        return await _answer(self._checks.image_facts, data, param, most, caller_of(request))

    async def sent_s(self, request: Request, image: BlobRef) -> float | None:
        """Return when a client has sent an image, in Unix time; None if it is not there (any more).

        Raises:
            BlobStoreError: the input store fails.
        """
        return await asyncio.to_thread(self._inputs.sent_s, owner_of(request), image)

    @property
    def grace_s(self) -> float:
        """Seconds for which what is sent is kept at least."""
        return self._inputs.grace_s

    async def store_one(
        self, request: Request, text: str, param: str, limits: LimitsConfig
    ) -> BlobRef:
        """Store an image of a JSON body; errors are those of :meth:`Uploads.store_text`."""
        uploads = self._uploads(request, limits)
        return await uploads.store_text(owner_of(request), text, param)

    async def of_edit(
        self, request: Request, sent: SentCall, limits: LimitsConfig
    ) -> CheckedImages:
        """Store the images of an edit where they are not yet, decode them and return what they are.

        One after the other, so that a call of many takes of the checks what one of one does.

        Raises:
            ApiError: an image is too large; 503 where there is nothing to decode them.
            BlobStoreError: the input store fails.
            InvalidRequest: one of them is no image, cannot be decoded, has too many pixels or
                several frames; the mask has no alpha, or leaves nothing to edit.
        """
        assert sent.images, "an edit has an image"
        mask = sent.mask
        refs = [
            await self.store_one(request, one, sent.param_of(index), limits)
            if isinstance(one, str)
            else one
            for index, one in enumerate(sent.images)
        ]
        if isinstance(mask, str):
            mask = await self.store_one(request, mask, "mask", limits)
        known: dict[BlobRef, ImageFacts] = {}
        for index, ref in enumerate(refs):
            if ref not in known:
                param = "image" if len(refs) == 1 else sent.param_of(index)
                known[ref] = await self.check_one(request, ref, param, limits)
        (image, facts), *more = (Picture(ref, known[ref]) for ref in refs)
        if mask is None:
            return CheckedImages(image, facts, more=tuple(more), param=sent.param)
        data, most = self._source(request, mask, limits), limits.max_input_pixels
        client = caller_of(request)
        mask_facts = await _answer(self._checks.mask_facts, data, "mask", most, client)
        return CheckedImages(image, facts, mask, mask_facts, tuple(more), sent.param)

    async def make_map(
        self, request: Request, image: BlobRef, order: MapOrder, limits: LimitsConfig
    ) -> MadeMap:
        """Have a ControlNet's map made of a stored image, and store it.

        Raises:
            ApiError: 503 where there is nothing to decode the image.
            BlobStoreError: the input store fails.
            InvalidRequest: it cannot be decoded, has too many pixels or several frames; or the
                detector cannot be run.
        """
        data, most = self._source(request, image, limits), limits.max_input_pixels
        order = replace(order, folder=self.detectors.folder)
        made = await _answer(self._checks.control_map, data, order, most, caller_of(request))
        inputs, owner = self._inputs_of(request, limits), owner_of(request)
        ref = await inputs.put(owner, once(made.png), max_bytes=len(made.png))
        return MadeMap(ref, made)

    def _uploads(self, request: Request, limits: LimitsConfig) -> Uploads:
        return Uploads(self._inputs_of(request, limits), limits)

    def _inputs_of(self, request: Request, limits: LimitsConfig) -> ClientInputs:
        most = limits.max_stored_bytes_per_client
        return ClientInputs(self._inputs, self._stored, caller_of(request), most)

    def _source(self, request: Request, ref: BlobRef, limits: LimitsConfig) -> Source:
        """Return what fetches a stored image: those that wait for their check take no memory."""
        return partial(self._inputs_of(request, limits).get, owner_of(request), ref)


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
    except _CHECK_ERRORS as error:
        logger.error("an image that a client sends is not checked: %r", error)
        raise unavailable(
            "The processes that check images do not answer; try again.", "checks_unavailable"
        ) from error


def take_images(body: dict[str, Any], kind: type[ImageGenerationRequest]) -> SentCall:
    """Take the images out of a JSON body, in either spelling, and return both.

    Args:
        kind: of its fields; images are taken of an edit, and of ControlNets.

    Raises:
        InvalidRequest: an edit has none, or too many, or one is not a text.
    """
    if not issubclass(kind, ImageEditRequest):
        return SentCall(body, _take_controlnet_images(body))
    image, images, mask = (body.pop(name, None) for name in ("image", "images", "mask"))
    if image is not None and images is not None:
        raise wrong("images", "and 'image' say the same", "leave one out")
    name, given = ("image", image) if images is None else ("images", images)
    several = given if isinstance(given, list) else [given]
    if given is None or not several:
        raise _no_image()
    if len(several) > kind.max_images:
        raise wrong(name, f"holds {len(several)} images; at most {kind.max_images} are allowed")
    if mask is not None and "mask" not in kind.image_fields:
        raise refused("mask", REFUSED_MASK)
    mask_text = None if mask is None else image_text(mask, "mask")
    sent = SentCall(body, _take_controlnet_images(body), tuple(several), mask_text, name)
    texts = (image_text(one, sent.param_of(index)) for index, one in enumerate(several))
    return replace(sent, images=tuple(texts))


def _take_controlnet_images(body: dict[str, Any]) -> list[object]:
    """Take the images out of a body's ControlNets and return them, None where there is none.

    What is no list of objects is left as it is, for the check of the fields.
    """
    entries = body.get("controlnets")
    if not isinstance(entries, list):
        return []
    objects = [dict(one) if isinstance(one, dict) else one for one in entries]
    body["controlnets"] = objects
    return [one.pop("image", None) if isinstance(one, dict) else None for one in objects]


def image_text(value: object, name: str) -> str:
    """Return an image's text: itself, or in OpenAI's object around it.

    Raises:
        InvalidRequest: it is neither; names ``name``.
    """
    allowed = "must be base64, a data URL or the id of an uploaded file"
    if isinstance(value, dict):
        if set(value) not in _OBJECT_KEYS:
            keys = describe(", ".join(map(str, value))) if value else "nothing in it"
            allowed = f"{allowed}, or an object with 'image_url' or 'file_id' alone"
            raise wrong(name, f"{allowed}; given an object with {keys}")
        [(key, value)] = value.items()
        if key == "file_id" and not (isinstance(value, str) and value.startswith(FILE_PREFIX)):
            hint = f"POST /v1/files returns ids; they begin with {FILE_PREFIX!r}."
            raise wrong(
                name, f"has a 'file_id' that is no id of a file: {describe(value)}", more=hint
            )
    if not isinstance(value, str):
        raise wrong(name, f"{allowed}; given {describe(value)}", code="invalid_type")
    return value


def no_file(name: str) -> InvalidRequest:
    """Return the error of a call whose one image is missing."""
    how = f"send an image, of a form as a file (with curl: -F {name}=@photo.png)"
    return missing(name, how)


def _no_image() -> InvalidRequest:
    how = "send the one to edit (of a form as the part 'image', several as parts of that name), "
    how += "or use /v1/images/generations for images from text alone"
    return missing("image", how)
