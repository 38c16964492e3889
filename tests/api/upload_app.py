"""Routes that take several images, as those of the service do not yet: for tests alone."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI
from starlette.requests import Request

from ray_cluster.api.access.auth import key_guard, owner_of
from ray_cluster.api.app import create_app
from ray_cluster.api.input.bounded_body import BodyLimit, read_object
from ray_cluster.api.input.form_reader import Uploads
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.requests import BlobRef
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore
from tests.fakes import FakeDispatcherClient, memory_results, sent_images, settings_for
from tests.keys import with_keys

# where the official client sends edits of the service below /v1/forms
FORM_URL, JSON_URL = "/v1/forms/images/edits", "/v1/json"
MAX_IMAGES = {"image": 3, "mask": 1}
MAX_INPUT_BYTES, MAX_UPLOAD_BYTES, MAX_BODY_BYTES = 100_000, 250_000, 4096
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 40
JPEG = b"\xff\xd8\xff\xe0" + bytes(range(256)) * 3
WEBP = b"RIFF\0\0\0\0WEBPVP8 " + bytes(300)


def ref_of(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


class UploadApp:
    """A gateway with two routes more, and its input store in a folder."""

    def __init__(
        self,
        config: ClusterConfig,
        folder: Path,
        *,
        keys: Sequence[str] = (),
        max_upload_s: float = 5.0,
        max_upload_bytes: int = MAX_UPLOAD_BYTES,
    ) -> None:
        limits = config.limits.model_copy(
            update={
                "max_input_bytes": MAX_INPUT_BYTES,
                "max_upload_bytes": max_upload_bytes,
                "max_body_bytes": MAX_BODY_BYTES,
                "max_upload_s": max_upload_s,
            }
        )
        settings = settings_for(with_keys(config.model_copy(update={"limits": limits}), *keys))
        self.folder = folder
        self.blobs = BlobStore(str(folder))
        self.inputs = InputStore(self.blobs, grace_s=3600.0, wall_clock=time.time)
        self.uploads = Uploads(self.inputs, limits)
        self._json_limit = BodyLimit.of_json(limits)
        self.app: FastAPI = create_app(
            FakeDispatcherClient(), settings, results=memory_results(), images=sent_images()
        )
        guards = [Depends(key_guard(settings))]
        for path, endpoint in ((FORM_URL, self.form), (JSON_URL, self.json)):
            self.app.add_api_route(path, endpoint, methods=["POST"], dependencies=guards)

    async def form(self, request: Request) -> dict[str, Any]:
        form = await self.uploads.read_form(request, MAX_IMAGES)
        images = {name: [ref.sha256 for ref in refs] for name, refs in form.images.items()}
        return {"owner": owner_of(request), "texts": form.texts, "images": images}

    async def json(self, request: Request) -> dict[str, Any]:
        body = await read_object(request, self._json_limit)
        ref = await self.uploads.store_text(owner_of(request), body["image"], "image")
        return {"owner": owner_of(request), "sha256": ref.sha256}

    @property
    def names(self) -> list[str]:
        """Entries of the input store."""
        return sorted(entry.name for entry in self.folder.iterdir())
