"""Images and bodies that edits refuse: by name, before anything is made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from ray_cluster.config.loading import ClusterConfig
from tests.api.checks import check_error, error_of
from tests.api.edit_calls import (
    EDITS,
    JOBS,
    PROMPT,
    VARIATIONS,
    Post,
    both_ways,
    by_form,
    by_json,
    edited,
    in_base64,
    mask,
    part,
    photo,
    refused,
)
from tests.api.test_limits import app_with, client_of
from tests.fakes import FakeDispatcherClient
from tests.imaging.hostile import animation, bombs
from tests.imaging.pictures import file_of, gradient, mask_file

CALL: dict[str, Any] = {"prompt": PROMPT, "image": photo()}
WITH_MASK: dict[str, Any] = {**CALL, "mask": mask()}


@pytest.mark.parametrize(
    ("images", "param", "code", "says"),
    [
        ({}, "image", "missing_required_parameter", "send the image to edit"),
        ({"mask": mask()}, "image", "missing_required_parameter", "/v1/images/generations"),
        ({"image": b""}, "image", "invalid_image", "is empty"),
        ({"image": b"GIF89a" + bytes(99)}, "image", "invalid_image", "PNG, JPEG or WebP"),
        ({"image": photo()[:-60]}, "image", "invalid_image", "cannot be decoded"),
        ({"image": animation("PNG")}, "image", "invalid_image", "is an animation"),
        ({"image": animation("WEBP")}, "image", "invalid_image", "is an animation"),
        ({"image": bombs()[1]}, "image", "invalid_image", "9500x9500 = 90250000 pixels"),
        ({"image": photo(), "mask": b"no mask"}, "mask", "invalid_image", "PNG, JPEG or WebP"),
        ({"image": photo(), "mask": mask()[:-40]}, "mask", "invalid_image", "cannot be decoded"),
        ({"image": photo(), "mask": photo()}, "mask", "invalid_image", "no alpha channel"),
        (
            {"image": photo(), "mask": file_of(Image.new("L", (64, 48)))},
            *("mask", "invalid_image", "black and white must be turned into one"),
        ),
        (
            {"image": photo(), "mask": mask_file(np.zeros((48, 64), bool))},
            *("mask", "invalid_image", "leaves nothing to edit"),
        ),
        (
            {"image": photo(), "mask": mask(48, 64)},
            *("mask", "invalid_value", "'mask' has 48x64 pixels, and 'image' 64x48"),
        ),
        ({"image": photo(), "mask": bombs()[1]}, "mask", "invalid_image", "9500x9500"),
    ],
)
@both_ways
async def test_a_wrong_image_is_named(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    post: Post,
    images: dict[str, bytes],
    param: str,
    code: str,
    says: str,
) -> None:
    message = await refused(http, fake, post, {"prompt": PROMPT, **images}, param, code)
    assert says in message


@pytest.mark.parametrize(
    ("images", "param", "code", "says"),
    [
        ({"image": {"file_id": "file-1"}}, "image", "invalid_value", "names a file"),
        ({"images": [{"file_id": "file-1"}]}, "images", "invalid_value", "names a file"),
        ({"image": "https://example.org/a.png"}, "image", "invalid_value", "does not fetch"),
        (
            {"image": {"image_url": "http://example.org/a.png"}},
            *("image", "invalid_value", "does not fetch"),
        ),
        ({"image": "photo.png"}, "image", "invalid_value", "must be base64"),
        ({"image": "data:image/png,abc"}, "image", "invalid_value", "data:image/png;base64"),
        ({"image": 5}, "image", "invalid_type", "given 5"),
        ({"image": True}, "image", "invalid_type", "given true"),
        ({"image": [None]}, "image", "invalid_type", "given null"),
        ({"image": [[in_base64(photo())]]}, "image", "invalid_type", "given an array"),
        ({"image": {"image_url": 5}}, "image", "invalid_type", "given 5"),
        ({"image": {}}, "image", "invalid_value", "'image_url' alone"),
        ({"image": {"image_url": "a", "detail": "b"}}, "image", "invalid_value", "detail"),
        ({"image": []}, "image", "missing_required_parameter", "required"),
        ({"images": []}, "image", "missing_required_parameter", "required"),
        ({"image": ["a", "b"]}, "image", "invalid_value", "holds 2 images; an edit takes 1"),
        ({"images": ["a"] * 16}, "images", "invalid_value", "holds 16 images; an edit takes 1"),
        ({"image": "a", "images": ["a"]}, "images", "invalid_value", "say the same"),
        ({"image": in_base64(photo()), "mask": [in_base64(mask())]}, "mask", "invalid_type", "arr"),
        ({"image": in_base64(photo()), "mask": ""}, "mask", "invalid_image", "is empty"),
    ],
)
@pytest.mark.parametrize("url", [EDITS, JOBS])
async def test_json_that_holds_no_image_is_refused_by_name(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    url: str,
    images: dict[str, Any],
    param: str,
    code: str,
    says: str,
) -> None:
    fields = {"prompt": PROMPT, **images}
    assert says in await refused(http, fake, by_json, fields, param, code, url)


@pytest.mark.parametrize(
    ("parts", "param", "code", "says"),
    [
        ([("image[]", photo()), ("image[]", photo())], "image[]", "invalid_value", "at most 1"),
        ([("image", photo())] * 2, "image", "duplicate_parameter", "'image[]'"),
        ([("image", photo()), ("mask", mask()), ("mask", mask())], "mask", "duplicate_param", ""),
        ([("image", "abc")], "image", "invalid_value", "must be a file"),
        ([("image", photo()), ("mask", "abc")], "mask", "invalid_value", "must be a file"),
        ([("images", photo())], "images", "invalid_value", "Files are allowed for: image, mask"),
        ([("image", photo()), ("prompt", b"a")], "prompt", "invalid_value", "must be a text"),
    ],
)
async def test_a_wrong_part_of_a_form_is_named(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    parts: list[tuple[str, bytes | str]],
    param: str,
    code: str,
    says: str,
) -> None:
    response = await http.post(EDITS, files=[(name, part(value)) for name, value in parts])
    assert response.status_code == 400
    error = error_of(response)
    assert error["param"] == param
    assert str(error["code"]).startswith(code)
    assert says in error["message"]
    assert fake.offered == []


# bodies


@pytest.mark.parametrize("url", [EDITS, VARIATIONS, JOBS])
@pytest.mark.parametrize("kind", ["text/plain", "", "multipart/mixed; boundary=b", "image/png"])
async def test_another_kind_of_body_is_a_415_that_names_both(
    http: httpx.AsyncClient, url: str, kind: str
) -> None:
    response = await http.post(url, content=photo(), headers={"content-type": kind})
    check_error(response, 415, code="unsupported_media_type")
    assert "JSON, or a form with files" in error_of(response)["message"]


async def test_generations_take_no_form(http: httpx.AsyncClient) -> None:
    response = await by_form(http, "/v1/images/generations", **CALL)
    check_error(response, 415, code="unsupported_media_type")
    assert "form with files" not in error_of(response)["message"]


@pytest.mark.parametrize("url", [EDITS, VARIATIONS, JOBS])
async def test_a_body_or_an_image_beyond_its_bound_is_a_413(
    fake: FakeDispatcherClient, config: ClusterConfig, url: str
) -> None:
    large = file_of(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    assert len(large) > 12_000
    for limits, code, param in (
        ({"max_input_bytes": 12_000}, "image_too_large", "image"),
        ({"max_input_bytes": 12_000, "max_upload_bytes": 12_000}, "body_too_large", None),
    ):
        async with client_of(app_with(fake, config, **limits)) as http:
            for post in (by_form, by_json):
                # as large as it may be: it is the body that is too large
                image = large[:12_000] if param is None else large
                response = await post(http, url, prompt=PROMPT, image=image)
                check_error(response, 413, code=code)
                assert error_of(response)["param"] == param
                assert "12000" in error_of(response)["message"]
    assert fake.offered == []


async def test_texts_of_a_form_are_bounded_as_json_is(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    response = await by_form(http, **CALL, user="x" * 4096)
    check_error(response, 413, code="body_too_large", param="user")
    assert fake.offered == []


async def test_only_an_edit_makes_a_jobs_body_large(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    # the bound of calls without images
    response = await http.post(JOBS, json={"prompt": PROMPT, "user": "x" * 5000})
    check_error(response, 413, code="body_too_large")
    assert "4096 bytes" in error_of(response)["message"]
    # a body that does not say how large it is has that bound, too
    body = json.dumps({"prompt": PROMPT, "image": in_base64(photo(256, 256)), "user": "x" * 5000})

    async def chunks() -> AsyncIterator[bytes]:
        yield body.encode()

    headers = {"content-type": "application/json"}
    response = await http.post(JOBS, content=chunks(), headers=headers)
    check_error(response, 413, code="body_too_large")
    # in an edit it is no matter
    response = await http.post(EDITS, content=chunks(), headers=headers)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("url", [EDITS, JOBS])
async def test_a_body_of_very_many_values_is_not_parsed(http: httpx.AsyncClient, url: str) -> None:
    content = b'{"prompt": "a", "image": [' + b"[]," * 200_000 + b"[]]}"
    headers = {"content-type": "application/json"}
    response = await http.post(url, content=content, headers=headers)
    check_error(response, 400, code="invalid_json")
    assert "more than 100000 values" in error_of(response)["message"]


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=b"])
async def test_a_body_that_never_ends_is_a_408(
    fake: FakeDispatcherClient, config: ClusterConfig, kind: str
) -> None:
    async def unending() -> AsyncIterator[bytes]:
        yield b'{"image": "' if kind == "application/json" else b"--b\r\n"
        await asyncio.Event().wait()

    async with client_of(app_with(fake, config, max_upload_s=0.2)) as http:
        response = await http.post(EDITS, content=unending(), headers={"content-type": kind})
    check_error(response, 408, code="body_too_slow")
    assert "limits.max_upload_s" in error_of(response)["message"]


async def test_grey_and_deep_images_are_edited(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    rgb = Image.fromarray(gradient(64, 48))
    deep = gradient(64, 48)[..., 0].astype(np.uint16) * 257
    for image in (
        *(file_of(rgb.convert(mode)) for mode in ("L", "LA", "P", "1", "RGBA")),
        file_of(rgb.convert("CMYK"), "JPEG"),
        file_of(Image.fromarray(deep)),
    ):
        request = await edited(http, fake, image=image, mask=mask())
        assert request.output_px == (64, 48)
