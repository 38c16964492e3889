"""The images that calls send, for edits and ControlNets: fetched from the store, decoded once."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol
from weakref import WeakValueDictionary

import numpy as np

from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.errors import MODEL_ERRORS, InvalidRequest, RequestFailed
from ray_cluster.imaging.edit_images import EditPixels, Paste, SentPixels
from ray_cluster.policies.edits import SizePx
from ray_cluster.replica.results import fair_client
from ray_cluster.replica.retries import retry_waits_s
from ray_cluster.requests import BlobRef, Edit, ImageRequest, OutputSpec
from ray_cluster.storage.blob_store import BlobStoreError

logger = logging.getLogger(__name__)

# a photo of 12 megapixels and its weights are 48 MB
_MOST_KEPT_BYTES = 256 << 20
# edits of one client whose files are in memory: one is fetched while another is decoded
_READ_AT_ONCE = 2
_MEASURED_PX = 256
_REPEATS = 3


class Inputs(Protocol):
    """The part of an :class:`~ray_cluster.storage.inputs.InputStore` that is used here."""

    def get(self, owner: str, ref: BlobRef) -> bytes | None: ...


class PixelReader(Protocol):
    """The part of an :class:`~ray_cluster.imaging.processes.image_coder.ImageCoder` that is used
    here."""

    def edit_pixels(
        self, image: bytes, mask: bytes | None, edit: Edit, work_px: SizePx, client: str = ""
    ) -> Future[EditPixels]: ...


class Coder(PixelReader, Protocol):
    """The part of it that encodes, too."""

    def submit(
        self, pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str]
    ) -> Future[bytes]: ...


class EditImages:
    """Decodes the images of edits, and keeps the last of them.

    They are needed twice, before the first step and when the image is pasted back, and by every
    image of a call. A replica that goes on with another's edit decodes them anew.

    Args:
        most_bytes: of pixels that are kept; what is larger than that alone is not.
    """

    def __init__(
        self, inputs: Inputs, reader: PixelReader, *, most_bytes: int = _MOST_KEPT_BYTES
    ) -> None:
        self._inputs = inputs
        self._reader = reader
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, EditPixels] = OrderedDict()
        self._reading: dict[Hashable, asyncio.Task[EditPixels]] = {}
        # by client; gone when nobody waits for its turn
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @property
    def num_bytes(self) -> int:
        """Of the pixels that are kept."""
        return sum(_size(one) for one in self._kept.values())

    async def pixels(self, request: ImageRequest) -> EditPixels:
        """Return the pixels of an edit.

        Raises:
            RequestFailed: its images are not in the store any more, or the store or what decodes
                them fails.
        """
        key = _key(request)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        # of several that ask, one reads; one that is cancelled leaves it to the others
        reading = self._reading.get(key)
        if reading is None:
            reading = self._reading[key] = asyncio.create_task(self._read(request))
            reading.add_done_callback(lambda done: self._note(key, done))
        return await asyncio.shield(reading)

    async def paste(self, request: ImageRequest) -> Paste | None:
        """Return where the image that was made of an edit goes; None for text to image."""
        if request.edit is None:
            return None
        return Paste(await self.pixels(request), request.edit.window)

    async def control_maps(self, request: ImageRequest) -> list[Pixels]:
        """Return the maps of a request's ControlNets, ``[H, W, 3]`` each; errors likewise."""
        controls = request.add_ons.controls
        return [await self._whole(request, one.image, request.size_px) for one in controls]

    async def sent(self, request: ImageRequest) -> SentPixels:
        """Return the images that a request is made from, but for its maps; errors likewise."""
        seen = [
            await self._whole(request, one.image, (one.width_px, one.height_px))
            for one in request.references
        ]
        edit = None if request.edit is None else await self.pixels(request)
        return SentPixels(edit, tuple(seen))

    async def _whole(self, request: ImageRequest, image: BlobRef, size_px: SizePx) -> Pixels:
        """Return an image in a size: it is read as that of an edit is of which nothing is cut."""
        width_px, height_px = size_px
        edit = Edit(image, size_px, request.num_steps)
        read = replace(request, edit=edit, width_px=width_px, height_px=height_px)
        return (await self.pixels(read)).work

    def _note(self, key: Hashable, done: asyncio.Task[EditPixels]) -> None:
        del self._reading[key]
        if done.cancelled() or done.exception() is not None:
            return
        if _size(done.result()) > self._most_bytes:
            # it would push all others out, and itself
            return
        self._kept[key] = done.result()
        while self.num_bytes > self._most_bytes:
            self._kept.popitem(last=False)

    async def _read(self, request: ImageRequest) -> EditPixels:
        edit = request.edit
        assert edit is not None, "only edits have images"
        # whatever goes wrong ends this request: an error of another kind would leave its lease open
        try:
            # files that wait for their turn are not fetched yet
            client = fair_client(request)
            async with self._turns.setdefault(client, asyncio.Semaphore(_READ_AT_ONCE)):
                image = await self._fetch(request, edit.image)
                mask = None if edit.mask is None else await self._fetch(request, edit.mask)
                reading = self._reader.edit_pixels(image, mask, edit, request.size_px, client)
                return await asyncio.wrap_future(reading)
        except InvalidRequest as error:
            # the gateway had found nothing wrong with them
            raise RequestFailed(error.message, "image") from error
        except MODEL_ERRORS as error:
            raise RequestFailed(f"{type(error).__name__}: {error}", "image") from error

    async def _fetch(self, request: ImageRequest, ref: BlobRef) -> bytes:
        for wait_s in (*retry_waits_s(request), None):
            try:
                data = await asyncio.to_thread(self._inputs.get, request.owner, ref)
            except BlobStoreError as error:
                logger.warning("an image to edit cannot be read: %s", error)
                if wait_s is None:
                    # clients are not to know where the store is
                    raise RequestFailed(
                        "the store of images that calls send does not answer", "input"
                    ) from error
                await asyncio.sleep(wait_s)
                continue
            if data is None:
                raise RequestFailed(
                    "an image that the call has sent is not there any more; send the call again",
                    "input",
                )
            return data
        raise AssertionError("the last try returns or raises")


def reading_per_megapixel_s(coder: Coder, clock: Callable[[], float]) -> float:
    """Measure what it takes to decode the image of an edit, a png, in seconds per million pixels.

    Args:
        clock: seconds.
    """
    side = _MEASURED_PX
    # as hard to code as photos are, and always the same
    pixels = np.random.default_rng(0).integers(0, 64, (side, side, 3), dtype=np.uint8)
    data = coder.submit(pixels, OutputSpec(), {}).result()
    edit = Edit(BlobRef("", len(data)), (side, side), 1)
    found_s = []
    for _ in range(_REPEATS):
        started_s = clock()
        coder.edit_pixels(data, None, edit, (side, side)).result()
        found_s.append(clock() - started_s)
    return min(found_s) / (side * side / 1e6)


def _key(request: ImageRequest) -> Hashable:
    """Return what the pixels depend on."""
    assert request.edit is not None, "only edits have images"
    # how much of the schedule is run changes no pixel
    edit = replace(request.edit, schedule_steps=0, strength=1.0, mask_ratio=1.0)
    return request.owner, request.size_px, edit


def _size(pixels: EditPixels) -> int:
    arrays = (pixels.work, pixels.mask, pixels.canvas, pixels.weights)
    return sum(one.nbytes for one in arrays if one is not None)
