"""Calls that edit images: an image, its masks, and how forms and JSON hold them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np

from ray_cluster.requests import BlobRef, ImageRequest
from tests.api.checks import check_error, error_of
from tests.fakes import FakeDispatcherClient
from tests.imaging.pictures import file_of, gradient, mask_file

EDITS, VARIATIONS, JOBS = "/v1/images/edits", "/v1/images/variations", "/v1/jobs"
PROMPT = "a red circle"


def picture(width: int = 64, height: int = 64, kind: str = "PNG") -> bytes:
    return file_of(gradient(width, height), kind)


def mask_of(box: tuple[int, int, int, int] | None, width: int = 64, height: int = 64) -> bytes:
    """Return a mask that edits a box (left, top, width, height); None for everything."""
    left, top, across, down = box or (0, 0, width, height)
    edited = np.zeros((height, width), np.bool_)
    edited[top : top + down, left : left + across] = True
    return mask_file(edited)


IMAGE = picture()
# a quarter of it
MASK = mask_of((16, 8, 32, 32))
WHOLE_MASK = mask_of(None)


def ref_of(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def parts(files: Mapping[str, bytes], fields: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the parts of a form: files as raw bytes, values as texts or as JSON."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in fields.items()
    }
    sent: list[tuple[str, Any]] = [(name, ("upload", data)) for name, data in files.items()]
    return sent + [(name, (None, text)) for name, text in texts.items()]


async def post_form(
    http: httpx.AsyncClient, image: bytes = IMAGE, mask: bytes | None = None, **fields: Any
) -> httpx.Response:
    files = {"image": image} | ({} if mask is None else {"mask": mask})
    return await http.post(EDITS, files=parts(files, {"prompt": PROMPT} | fields))


async def post_json(
    http: httpx.AsyncClient, image: bytes = IMAGE, mask: bytes | None = None, **fields: Any
) -> httpx.Response:
    body = {"prompt": PROMPT, "image": coded(image)}
    if mask is not None:
        body["mask"] = coded(mask)
    return await http.post(EDITS, json=body | fields)


async def edited(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    image: bytes = IMAGE,
    mask: bytes | None = None,
    **fields: Any,
) -> ImageRequest:
    """Return the request that a call becomes: the first one of its images."""
    reply = await post_form(http, image, mask, **fields)
    assert reply.status_code == 200, reply.text
    return fake.offered[-1][0]


async def refused_edit(
    http: httpx.AsyncClient,
    param: str | None,
    image: bytes = IMAGE,
    mask: bytes | None = None,
    *,
    code: str | None = None,
    **fields: Any,
) -> str:
    """Return the message of a call that is refused with 400, by a parameter's name."""
    reply = await post_form(http, image, mask, **fields)
    check_error(reply, 400, code=code)
    error = error_of(reply)
    assert error["param"] == param, error
    assert param is None or repr(param) in error["message"]
    return str(error["message"])
