"""Encodes finished images, and puts them into the reply or the result store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ray_cluster.engine.stages.autoencoder import Pixels
from ray_cluster.engine.stages.events import Decoded, Previewed
from ray_cluster.errors import MODEL_ERRORS, RequestFailed
from ray_cluster.imaging.edit_images import Paste, SentPixels
from ray_cluster.observability.logs import bound, fields_of
from ray_cluster.replica.results import Results, ResultStore, fair_client
from ray_cluster.requests import ImageRequest, ImageResult, OutputSpec

# of an image that another worker goes on with
_LOSSLESS = OutputSpec(metadata=False)


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

    async def sent(self, request: ImageRequest) -> SentPixels: ...

    async def paste(self, request: ImageRequest) -> Paste | None: ...

    async def control_maps(self, request: ImageRequest) -> list[Pixels]: ...


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
        self._results = Results(results)
        self._edits = edits

    async def sent(self, request: ImageRequest) -> SentPixels:
        """Return the images that a request is made from, but for its maps.

        Raises:
            RequestFailed: they cannot be had.
        """
        if self._edits is None:
            raise RequestFailed("this replica makes no edits", "image")
        return await self._edits.sent(request)

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
        self._results.note_end(request_id)

    async def deliver(self, event: Decoded, candidate: str = "") -> ImageResult:
        """Return the finished image, or a note of its size if it is stored.

        Args:
            candidate: name in the result store of one that is not to be published yet.

        Raises:
            RequestFailed: it could not be coded, or several tries to store it failed; those of a
                job go on for minutes.
        """
        request = event.request
        # for what the coder and the result store write
        with self._results.work_on(request.request_id), bound(**fields_of(request)):
            is_stored, spec = request.output.is_stored, request.output
            if candidate:
                is_stored = request.leaves_files
                spec = _LOSSLESS if request.last_stages else spec
            data = await self._code(request, event.pixels, spec, request.recipe())
            num_bytes = len(data)
            if is_stored:
                await self._results.put(request, candidate or request.file_id, data)
                data = b""
        return ImageResult(
            request.request_id,
            data,
            request.output.image_format,
            event.timing,
            num_bytes,
            event.steps_by_degree,
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
        await self._results.put(request, request.preview_file_id(index), data, ())
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
