"""Encodes finished images, and puts them into the reply or the result store."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from ray_cluster.engine.autoencoder import Pixels
from ray_cluster.engine.events import Decoded, Previewed
from ray_cluster.errors import MODEL_ERRORS, InvalidRequest, RequestFailed
from ray_cluster.observability.logs import bound, fields_of
from ray_cluster.requests import Failure, ImageResult, OutputSpec, candidate_name
from ray_cluster.storage.blob_store import BlobStoreError

logger = logging.getLogger(__name__)

# a client waits for the reply
_RETRY_S = (0.2, 1.0, 3.0)
# a job outlives the death of every process, so also a while without its store
_JOB_RETRY_S = (*_RETRY_S, 10.0, 30.0, 60.0, 120.0)


class Coder(Protocol):
    """The part of an :class:`~ray_cluster.imaging.encoder.ImageCoder` that is used here."""

    def submit(
        self, pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str]
    ) -> Future[bytes]: ...


class ResultStore(Protocol):
    """The part of a :class:`~ray_cluster.storage.blob_store.BlobStore` that is used here."""

    def put(self, name: str, data: bytes) -> None: ...


class Delivery:
    """Encodes decoded images, and stores those that do not travel in the reply.

    Args:
        results: None where no request may ask for storing.
    """

    def __init__(self, coder: Coder, results: ResultStore | None = None) -> None:
        self._coder = coder
        self._results = results
        self._under_way: Counter[str] = Counter()
        self._ended: set[str] = set()

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
        data = await self._code(event.pixels, request.output, request.recipe())
        num_bytes = len(data)
        if request.output.is_stored:
            retry_s = _JOB_RETRY_S if request.job_id else _RETRY_S
            name = candidate_name(request.request_id) if is_candidate else request.file_id
            await self._store(request.request_id, name, data, retry_s)
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
        data = await self._code(event.pixels, replace(request.output, metadata=False), {})
        if not request.output.is_stored:
            return data
        await self._store(request.request_id, request.preview_file_id(index), data, ())
        return b""

    async def _code(self, pixels: Pixels, spec: OutputSpec, recipe: Mapping[str, str]) -> bytes:
        try:
            return await asyncio.wrap_future(self._coder.submit(pixels, spec, recipe))
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
