"""``/v1/files``: images out of the result store, and those that clients upload for later calls."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from contextvars import Context
from http import HTTPStatus

from starlette.requests import Request
from starlette.responses import Response

from ray_cluster.api.advice import REFUSED_OF_UPLOADS
from ray_cluster.api.errors import ApiError, not_found, unavailable
from ray_cluster.api.input.image_store import FILE_PREFIX, file_id_of, file_of_id
from ray_cluster.api.input.schemas import FileUpload
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.api.input.validation import validate_as
from ray_cluster.api.output.resource_schemas import FileResponse
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.protocol.leases import LATE_WRITE_S
from ray_cluster.requests import BlobRef, ImageRequest
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
        max_age_s = int(self._settings.document().storage.retention_s)
        headers = {
            "Cache-Control": f"private, max-age={max_age_s}, immutable",
            "ETag": f'"{file_id}"',
            # an image is never anything else, whatever a browser thinks of its bytes
            "X-Content-Type-Options": "nosniff",
        }
        data = await self.read(file_id)
        if data is None:
            raise _not_found(file_id)
        if has_etag(request, headers["ETag"]):
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


def has_etag(request: Request, etag: str) -> bool:
    """Return whether the caller has it already; proxies that compress make tags weak ones (W/)."""
    given = ",".join(request.headers.getlist("if-none-match")).split(",")
    return bool({"*", etag} & {one.strip().removeprefix("W/") for one in given})


def _not_found(file_id: str) -> ApiError:
    return not_found(
        f"There is no file {file_id[:100]!r}; images are forgotten after a while.",
        "file_not_found",
    )


class UploadedFilesEndpoint:
    """Stores and describes the images that clients upload; each sees only its own.

    Args:
        clock: Unix time in seconds.
    """

    def __init__(
        self, images: SentImages, settings: CurrentSettings, clock: Callable[[], float]
    ) -> None:
        self._images = images
        self._settings = settings
        self._clock = clock

    async def create(self, request: Request) -> FileResponse:
        """Keep an image for a while; its id stands for it in later calls.

        The body is a form with the file `file` and `purpose: vision`. The image is checked as those
        of edits are. It is forgotten some time after its upload, or after the last call that named
        it, but never while an image is made from it.
        """
        limits = self._settings.latest.limits
        texts, ref = await self._images.read_one(request, "file", limits)
        validate_as(FileUpload, texts, REFUSED_OF_UPLOADS)
        await self._images.check_one(request, ref, "file", limits)
        return self._reply(ref, self._clock())

    async def retrieve(self, digest: str, request: Request) -> FileResponse:
        """Describe a file that this client has uploaded, or that was made for it."""
        file_id = FILE_PREFIX + digest
        ref = file_of_id(file_id)
        sent_s = None if ref is None else await self._images.sent_s(request, ref)
        if ref is None or sent_s is None:
            raise not_found(
                f"There is no file {file_id[:100]!r} of yours; files are forgotten after a while. "
                "Upload it again.",
                "file_not_found",
            )
        return self._reply(ref, sent_s)

    def _reply(self, ref: BlobRef, sent_s: float) -> FileResponse:
        return FileResponse(
            id=file_id_of(ref),
            bytes=ref.num_bytes,
            created_at=int(sent_s),
            expires_at=int(sent_s + self._images.grace_s),
            filename=f"{ref.sha256[:16]}.image",
        )
