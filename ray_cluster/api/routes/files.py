"""``GET /v1/files/{id}``: images out of the result store."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from contextvars import Context
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.errors import ApiError, not_found, unavailable
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.protocol.leases import LATE_WRITE_S
from ray_cluster.requests import ImageRequest
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError

logger = logging.getLogger(__name__)

PATH = "/v1/files"
_FILE_ID = re.compile(r"img-[0-9a-f]{32}(-[0-9])?\.(png|jpeg|webp)")


def url_of(request: Request, path: str) -> str:
    """Return the URL of a path of this API, where this caller has called it."""
    return str(request.base_url).rstrip("/") + path


def url_maker(request: Request) -> Callable[[str], str]:
    """Return a function that makes URLs of files."""
    base = url_of(request, PATH)
    return lambda file_id: f"{base}/{file_id}"


class FilesEndpoint:
    """Returns images and previews, and deletes those whose links nobody has.

    Their ids can't be guessed, so that a link needs no key.
    """

    def __init__(self, results: BlobStore, settings: CurrentSettings) -> None:
        self._results = results
        self._settings = settings
        self._deleting: set[asyncio.Task[None]] = set()

    async def download(self, file_id: str, request: Request) -> Response:
        """Return an image. It never changes: keep it as long as you like."""
        if _FILE_ID.fullmatch(file_id) is None:
            raise _not_found(file_id)
        max_age_s = int(self._settings.get().retention_s)
        headers = {
            "Cache-Control": f"private, max-age={max_age_s}, immutable",
            "ETag": f'"{file_id}"',
            # an image is never anything else, whatever a browser thinks of its bytes
            "X-Content-Type-Options": "nosniff",
        }
        data = await self.read(file_id)
        if data is None:
            raise _not_found(file_id)
        if _has(request, headers["ETag"]):
            return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
        media_type = f"image/{file_id.rpartition('.')[2]}"
        return Response(data, media_type=media_type, headers=headers)

    async def read(self, file_id: str) -> bytes | None:
        """Return an image's bytes; None if it is not there (any more).

        Raises:
            ApiError: 503 if the store does not answer.
        """
        try:
            return await asyncio.to_thread(self._results.get, file_id)
        except BlobStoreError as error:
            logger.error("a result could not be read: %s", error)
            raise unavailable(
                "The result store does not answer; try again.", "result_store_unavailable"
            ) from error

    def delete_later(self, requests: Sequence[ImageRequest]) -> None:
        """Delete what was stored for a call that ended without its images."""
        names = [name for one in requests if one.output.is_stored for name in one.file_ids]
        if names:
            # in a context of its own: Serve cancels what a cancelled request has called
            task = asyncio.create_task(self._delete(names), context=Context())
            self._deleting.add(task)
            task.add_done_callback(self._deleting.discard)

    async def _delete(self, names: Sequence[str]) -> None:
        await asyncio.sleep(LATE_WRITE_S)
        try:
            await asyncio.to_thread(self._results.delete, names)
        except BlobStoreError as error:
            logger.warning("images that nobody gets are left to the sweep: %s", error)


def _has(request: Request, etag: str) -> bool:
    """Whether the caller has it already; proxies that compress make tags weak ones (W/)."""
    given = ",".join(request.headers.getlist("if-none-match")).split(",")
    return bool({"*", etag} & {one.strip().removeprefix("W/") for one in given})


def _not_found(file_id: str) -> ApiError:
    return not_found(
        f"There is no file {file_id[:100]!r}; images are forgotten after a while.",
        "file_not_found",
    )
