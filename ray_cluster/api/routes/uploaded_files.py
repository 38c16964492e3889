"""``POST /v1/files``: keeps an image of a client's for a while, under an id for later calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request

from ray_cluster.api.errors import not_found
from ray_cluster.api.input.file_ids import FILE_PREFIX, file_id_of, file_of_id
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.api.input.validation import validate_as
from ray_cluster.api.settings import CurrentSettings
from ray_cluster.requests import BlobRef

_NOT_OFFERED = {
    "expires_after": "Files are kept for as long as the service says (storage.inputs_grace_s)."
}


class FileUpload(BaseModel):
    """What uploads a file, beside the file itself."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    purpose: Literal["vision"] = Field(description="OpenAI's; `vision`: an image.")


class FileResponse(BaseModel):
    """OpenAI's File: an uploaded image."""

    id: str = Field(description="Names it in `file_id`, and wherever calls take an image.")
    object: Literal["file"] = "file"
    bytes: int = Field(description="Its size.")
    created_at: int = Field(
        description="Unix time in seconds, of its upload or of the last call that named it."
    )
    expires_at: int = Field(
        description="Unix time in seconds until which it is kept at least; each call that names it "
        "starts that time anew."
    )
    filename: str = Field(description="Made of the id: the name that was sent is not kept.")
    purpose: Literal["vision"] = "vision"
    status: Literal["processed"] = "processed"


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
        limits = self._settings.limits
        texts, ref = await self._images.read_one(request, "file", limits)
        validate_as(FileUpload, texts, _NOT_OFFERED)
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
