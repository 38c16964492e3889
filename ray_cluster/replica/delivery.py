"""Encodes finished images, and puts them into the reply or the result store."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.engine.stages.events import Decoded, Previewed
from ray_cluster.errors import MODEL_ERRORS, InvalidRequest, RequestFailed
from ray_cluster.imaging.edit_images import EditPixels, Paste
from ray_cluster.observability.logs import bound, fields_of
from ray_cluster.replica.denoise.sent_images import fair_client
from ray_cluster.replica.retries import retry_waits_s
from ray_cluster.requests import Failure, ImageRequest, ImageResult, OutputSpec, candidate_name
from ray_cluster.storage.blob_store import BlobStoreError

logger = logging.getLogger(__name__)


class Coder(Protocol):
    """The part of an :class:`~ray_cluster.imaging.processes.image_coder.ImageCoder` that is used
    here."""

    def submit(
        self,
        pixels: Pixels,
        spec: OutputSpec,
        recipe: Mapping[str, str],
        paste: Paste | None = None,
        client: str = "",
    ) -> Future[bytes]: ...


class Templates(Protocol):
    """The part of :class:`~ray_cluster.replica.denoise.sent_images.EditImages` that is used
    here."""

    async def pixels(self, request: ImageRequest) -> EditPixels: ...

    async def paste(self, request: ImageRequest) -> Paste | None: ...

    async def control_maps(self, request: ImageRequest) -> list[Pixels]: ...


class ResultStore(Protocol):
    """The part of a :class:`~ray_cluster.storage.blob_store.BlobStore` that is used here."""

    def put(self, name: str, data: bytes) -> None: ...


class Delivery:
    """Encodes decoded images, and stores those that do not travel in the reply.

    What was made of an edit is pasted into its template on the way.

    Args:
        results: None where no request may ask for storing.
        edits: has the templates; None where no request is an edit.
    """

    def __init__(
        self, coder: Coder, results: ResultStore | None = None, edits: Templates | None = None
    ) -> None:
        self._coder = coder
        self._results = results
        self._edits = edits
        self._under_way: Counter[str] = Counter()
        self._ended: set[str] = set()

    async def pixels(self, request: ImageRequest) -> EditPixels:
        """Return the pixels of an edit.

        Raises:
            RequestFailed: they cannot be had.
        """
        if self._edits is None:
            raise RequestFailed("this replica makes no edits", "image")
        return await self._edits.pixels(request)

    async def control_maps(self, request: ImageRequest) -> tuple[Tensor, ...]:
        """Return the maps of a request's ControlNets, ``[H, W, 3]`` uint8 each.

        Raises:
            RequestFailed: they cannot be had.
        """
        if self._edits is None:
            raise RequestFailed("this replica follows no maps", "image")
        return tuple(map(torch.tensor, await self._edits.control_maps(request)))

    def note_end(self, request_id: str) -> None:
        """Do not store an image any more: its request has ended otherwise."""
        if request_id in self._under_way:
            self._ended.add(request_id)

    async def deliver(self, event: Decoded, *, is_candidate: bool = False) -> ImageResult:
        """Return the finished image, or a note of its size if it is stored.

        Args:
            is_candidate: whether it is not to be published yet, nor stored under its public name.

        Raises:
            RequestFailed: it could not be coded, or several tries to store it failed; those of a
                job go on for minutes.
        """
        request_id = event.request.request_id
        self._under_way[request_id] += 1
        try:
            # for what the coder and the result store write
            with bound(**fields_of(event.request)):
                return await self._deliver(event, is_candidate=is_candidate)
        finally:
            self._under_way -= Counter([request_id])
            if request_id not in self._under_way:
                self._ended.discard(request_id)

    async def _deliver(self, event: Decoded, *, is_candidate: bool) -> ImageResult:
        request = event.request
        data = await self._code(request, event.pixels, request.output, request.recipe())
        num_bytes = len(data)
        if request.output.is_stored:
            name = candidate_name(request.request_id) if is_candidate else request.file_id
            await self._store(request.request_id, name, data, retry_waits_s(request))
            data = b""
        return ImageResult(
            request.request_id, data, request.output.image_format, event.timing, num_bytes
        )

    async def preview(self, event: Previewed, index: int) -> bytes:
        """Return a coded preview, or nothing if it is stored.

        Raises:
            RequestFailed: it could not be coded, or the one try to store it failed.
        """
        request = event.request
        spec = replace(request.output, metadata=False)
        data = await self._code(request, event.pixels, spec, {})
        if not request.output.is_stored:
            return data
        await self._store(request.request_id, request.preview_file_id(index), data, ())
        return b""

    async def _code(
        self, request: ImageRequest, pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str]
    ) -> bytes:
        paste = None if self._edits is None else await self._edits.paste(request)
        try:
            coding = self._coder.submit(pixels, spec, recipe, paste, fair_client(request))
            return await asyncio.wrap_future(coding)
        except MODEL_ERRORS as error:
            raise RequestFailed(f"{type(error).__name__}: {error}", "coding") from error

    async def _store(
        self, request_id: str, file_id: str, data: bytes, retry_s: tuple[float, ...]
    ) -> None:
        if self._results is None:
            raise RequestFailed("this replica has no result store", "storing")
        for wait_s in (*retry_s, None):
            # deleting it later could delete the image that another replica has made of it
            if request_id in self._ended:
                return
            try:
                await asyncio.to_thread(self._results.put, file_id, data)
            except BlobStoreError as error:
                logger.warning("an image is not stored: %s", error)
                if wait_s is None:
                    # clients are not to know where the store is
                    raise RequestFailed("the result store did not take it", "storing") from error
                await asyncio.sleep(wait_s)
            else:
                return


def failure_of(request_id: str, error: RequestFailed | InvalidRequest) -> Failure:
    """Return an error as the client sees it."""
    if isinstance(error, InvalidRequest):
        return Failure(request_id, "invalid", error.message, "encode", error.param, code=error.code)
    return Failure(request_id, "error", error.message, error.stage)
