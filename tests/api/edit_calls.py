"""Calls that edit images: the same content as a form and as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx
import numpy as np
import pytest

from ray_cluster.requests import ImageRequest
from tests.api.checks import check_error, error_of
from tests.fakes import FakeDispatcherClient
from tests.imaging.pictures import file_of, gradient, mask_file

EDITS, VARIATIONS, JOBS = "/v1/images/edits", "/v1/images/variations", "/v1/jobs"
PROMPT = "a red circle"
Post = Callable[..., Awaitable[httpx.Response]]


def photo(width: int = 64, height: int = 48, kind: str = "PNG", **options: Any) -> bytes:
    return file_of(gradient(width, height), kind, **options)


def mask(
    width: int = 64, height: int = 48, box: tuple[int, int, int, int] = (8, 8, 16, 12)
) -> bytes:
    """A mask with a box of left, top, width and height to be edited."""
    edited = np.zeros((height, width), bool)
    left, top, across, down = box
    edited[top : top + down, left : left + across] = True
    return mask_file(edited)


def mask_of_all(width: int = 64, height: int = 48) -> bytes:
    return mask(width, height, (0, 0, width, height))


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part(value: object) -> tuple[str | None, bytes | str]:
    """A part of a form: bytes are a file, all else is a text."""
    if isinstance(value, bytes):
        # neither name nor kind of a file says anything
        return ("upload.txt", value)
    return (None, value if isinstance(value, str) else json.dumps(value))


async def by_form(
    http: httpx.AsyncClient,
    url: str = EDITS,
    *,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> httpx.Response:
    parts: Any = [(name, part(value)) for name, value in fields.items()]
    return await http.post(url, files=parts, headers=headers)


async def by_json(
    http: httpx.AsyncClient,
    url: str = EDITS,
    *,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> httpx.Response:
    body = {
        name: in_base64(value) if isinstance(value, bytes) else value
        for name, value in fields.items()
    }
    return await http.post(url, json=body, headers=headers)


both_ways = pytest.mark.parametrize("post", [by_form, by_json])


async def edited(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    post: Post = by_form,
    url: str = EDITS,
    **fields: Any,
) -> ImageRequest:
    """The one request that a call becomes."""
    response = await post(http, url, **{"prompt": PROMPT, "image": photo(), **fields})
    assert response.status_code == 200, response.text
    [request] = fake.offered[-1]
    return request


async def refused(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    post: Post,
    fields: dict[str, Any],
    param: str | None,
    code: str = "invalid_value",
    url: str = EDITS,
) -> str:
    """Make a call that has to be refused with 400; returns the message."""
    response = await post(http, url, **fields)
    check_error(response, 400, code=code)
    error = error_of(response)
    assert error["param"] == param, error
    assert fake.offered == []
    return str(error["message"])
