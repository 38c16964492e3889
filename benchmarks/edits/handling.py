"""What the images of one edit cost beside its steps, part by part, as the service handles them."""

from __future__ import annotations

import asyncio
import io
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from starlette.requests import Request

from benchmarks.edits.settings import EditSettings
from benchmarks.edits.subject import mask, picture
from benchmarks.engine.subject import Subject, load_subject, make_requests
from benchmarks.report import Section
from benchmarks.settings import Report
from benchmarks.stats import summarise
from benchmarks.stopwatch import in_turns
from ray_cluster.api.input.schemas import ImageEditRequest
from ray_cluster.api.input.sent_images import SentCall, SentImages
from ray_cluster.config.sections.cell_wide import LimitsConfig, StorageConfig
from ray_cluster.imaging.edit_images import EditPixels, Paste
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.replica.denoise.sent_images import EditImages
from ray_cluster.requests import BlobRef, Edit, ImageRequest, OutputSpec
from ray_cluster.storage.inputs import OPEN_OWNER, InputStore

# of what a server hands to its application at once
_PIECE_BYTES = 64 << 10
_FEATHER_PX = 4
# the table's columns, in the order in which a call passes them
_PARTS = ("upload", "check", "read", "encode", "code", "paste_and_code")


def measure(settings: EditSettings, report: Report) -> Section:
    """Return the section."""
    report(0.0, "loading")
    subject, rows = load_subject(), []
    with (
        tempfile.TemporaryDirectory() as folder,
        ImageCoder() as coder,
        asyncio.Runner() as loop,
    ):
        inputs = InputStore.open(folder, grace_s=StorageConfig().inputs_grace_s)
        for index, px in enumerate(settings.sizes_px):
            report(index / len(settings.sizes_px), f"{px} px")
            parts = _Parts(subject, coder, inputs, _Files.of(px), loop)
            ways = {name: getattr(parts, name) for name in _PARTS}
            # so that no way is slower for being first
            in_turns(ways, 1)
            costs = in_turns(ways, settings.handling_rounds)
            figures = {
                f"{name}_ms": summarise([1e3 * one.wall_s for one in costs[name]]).as_dict()
                for name in _PARTS
            }
            rows.append({"px": px, "file_kib": parts.files.num_bytes / 1024} | figures)
    return {
        "what": "one edit's image and mask, both PNG, by the parts of the service that handle "
        "them, on the wall clock. upload: a form into the input store; check: both fetched and "
        "decoded before the call is accepted; read: the same on the replica, with the weights of a "
        f"feather of {_FEATHER_PX} px; encode: by the autoencoder, one thread; code: as PNG; paste "
        "and code: the same after pasting back",
        "tables": {"ms of one edit, beside its steps": rows},
    }


@dataclass(frozen=True, slots=True)
class _Files:
    """What a client sends.

    Attributes:
        body: the form that holds both files.
    """

    image: bytes
    mask: bytes
    body: bytes
    content_type: str
    px: int

    @classmethod
    def of(cls, px: int) -> _Files:
        alpha = np.where(mask(px, 1), 0, 255).astype(np.uint8)
        image, edited = (_png(one) for one in (picture(px, 1), np.stack([alpha, alpha], axis=2)))
        sent = httpx.Request(
            "POST",
            "http://localhost/v1/images/edits",
            data={"prompt": "a large red circle", "feather_px": str(_FEATHER_PX)},
            files={"image": image, "mask": edited},
        )
        return cls(image, edited, sent.read(), sent.headers["content-type"], px)

    @property
    def num_bytes(self) -> int:
        """Of both files."""
        return len(self.image) + len(self.mask)

    def call(self) -> Request:
        """Return the call, its body in the pieces in which a server hands it on."""
        pieces = iter(range(0, len(self.body), _PIECE_BYTES))

        async def receive() -> dict[str, Any]:
            start = next(pieces)
            end = start + _PIECE_BYTES
            more = end < len(self.body)
            return {"type": "http.request", "body": self.body[start:end], "more_body": more}

        headers = {"content-type": self.content_type, "content-length": str(len(self.body))}
        coded = [(name.encode(), value.encode()) for name, value in headers.items()]
        return Request({"type": "http", "method": "POST", "headers": coded}, receive)


class _Parts:
    """The parts of an edit's way through the service, each as a call."""

    def __init__(
        self,
        subject: Subject,
        coder: ImageCoder,
        inputs: InputStore,
        files: _Files,
        loop: asyncio.Runner,
    ) -> None:
        self.files = files
        self._subject, self._coder, self._loop = subject, coder, loop
        self._limits = LimitsConfig()
        self._sent = SentImages(inputs, coder)
        # every edit is the first of its image
        self._images = EditImages(inputs, coder, most_bytes=0)
        self.image, self.mask = self.upload()
        self._pixels = self.read()
        self._made = picture(files.px, 2)

    def upload(self) -> tuple[BlobRef, BlobRef]:
        reading = self._sent.read_form(self.files.call(), self._limits, ImageEditRequest)
        sent = self._loop.run(reading)
        image, edited = sent.image, sent.mask
        assert isinstance(image, BlobRef)
        assert isinstance(edited, BlobRef)
        assert image.num_bytes + edited.num_bytes == self.files.num_bytes
        return image, edited

    def check(self) -> None:
        sent = SentCall({}, [], self.image, self.mask)
        self._loop.run(self._sent.of_edit(self.files.call(), sent, self._limits))

    def read(self) -> EditPixels:
        return self._loop.run(self._images.pixels(self._request))

    @property
    def _request(self) -> ImageRequest:
        px = self.files.px
        [one] = make_requests(1, px=px, num_steps=20, guidance_scale=1.0)
        edit = Edit(self.image, (px, px), 20, mask=self.mask, feather_px=_FEATHER_PX)
        return replace(one, owner=OPEN_OWNER, edit=edit)

    @torch.inference_mode()
    def encode(self) -> None:
        self._subject.model.images.encode([self._pixels.work])

    def code(self) -> None:
        self._coder.submit(self._made, OutputSpec(), {}).result()

    def paste_and_code(self) -> None:
        self._coder.submit(self._made, OutputSpec(), {}, Paste(self._pixels, None)).result()


def _png(pixels: Any) -> bytes:
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "PNG")
    return data.getvalue()
