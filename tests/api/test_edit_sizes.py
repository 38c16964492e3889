"""Sizes of edits: the image that is returned, the part of it that is made, and at which size."""

from __future__ import annotations

import io
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from ray_cluster.policies.edits import Box
from tests.api.edit_calls import IMAGE, MASK, edited, mask_of, picture, post_form, refused_edit
from tests.fakes import FakeDispatcherClient
from tests.imaging.pictures import exif_of, file_of, gradient

Size = tuple[int, int]
Sides = tuple[int, int, int, int]


@pytest.mark.parametrize(
    ("image_px", "fields", "canvas", "work"),
    [
        ((50, 40), {}, (50, 40), (56, 40)),
        # what a recipe repeats is on no grid
        ((50, 40), {"size": "50x40"}, (50, 40), (56, 40)),
        # too long for the proportions to be kept
        ((512, 20), {}, (256, 32), (256, 32)),
        ((512, 300), {}, (256, 150), (256, 152)),
        ((512, 300), {"size": "256x150"}, (256, 150), (256, 152)),
    ],
)
@pytest.mark.parametrize("has_mask", [False, True])
async def test_a_size_off_the_grid_is_filled_up(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    has_mask: bool,
    image_px: Size,
    fields: dict[str, Any],
    canvas: Size,
    work: Size,
) -> None:
    mask = mask_of((0, 0, 8, 8), *image_px) if has_mask else None
    request = await edited(http, fake, picture(*image_px), mask, **fields)
    assert request.edit is not None
    assert (request.output_px, request.size_px, request.edit.window) == (canvas, work, None)


async def test_another_size_off_the_grid_is_refused_with_the_nearest(
    http: httpx.AsyncClient,
) -> None:
    for size in ("50x40", "512x300", "16x16"):
        assert "Nearest: " in await refused_edit(http, "size", IMAGE, MASK, size=size)


@pytest.mark.parametrize(
    ("image_px", "box", "fields", "canvas", "window", "work"),
    [
        # the model's native size around a small mask, within the image
        ((300, 200), (150, 100, 10, 10), {}, (300, 200), (123, 73, 64, 64), (64, 64)),
        ((300, 200), (0, 190, 10, 10), {}, (300, 200), (0, 136, 64, 64), (64, 64)),
        # a margin around a larger one
        ((300, 200), (60, 80, 100, 40), {}, (300, 200), (34, 52, 152, 96), (152, 96)),
        # scaled down where the model makes nothing so large
        ((600, 600), (150, 150, 300, 300), {}, (600, 600), (72, 72, 456, 456), (256, 256)),
        # the mask goes with the image to another size
        (
            *((300, 200), (150, 100, 10, 10), {"size": "256x128"}),
            *((256, 128), (100, 35, 64, 64), (64, 64)),
        ),
        # nothing to cut off
        ((64, 48), (8, 8, 16, 12), {}, (64, 48), None, (64, 48)),
    ],
)
async def test_a_crop_is_what_is_around_the_mask(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    image_px: Size,
    box: Sides,
    fields: dict[str, Any],
    canvas: Size,
    window: Sides | None,
    work: Size,
) -> None:
    mask = mask_of(box, *image_px)
    reply = await post_form(http, picture(*image_px), mask, crop="auto", **fields)
    assert reply.status_code == 200, reply.text
    [request] = fake.offered[-1]
    assert request.edit is not None
    assert request.edit.window == (None if window is None else Box(*window))
    assert (request.output_px, request.size_px) == (canvas, work)
    [made] = reply.json()["data"]
    assert made["edit"]["crop"] == (None if window is None else list(window))
    share = box[2] * box[3] / (image_px[0] * image_px[1])
    seen = canvas if window is None else window[2:]
    expected = share * canvas[0] * canvas[1] / (seen[0] * seen[1])
    assert made["edit"]["mask_ratio"] == pytest.approx(expected, abs=1e-6)


async def test_a_mask_is_turned_as_its_own_exif_data_says(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    lying = file_of(Image.open(io.BytesIO(mask_of((0, 0, 8, 8), 64, 48))), exif=exif_of(6))
    request = await edited(http, fake, picture(48, 64), lying)
    assert request.output_px == (48, 64)
    assert "48x64" in await refused_edit(http, "mask", picture(64, 48), lying)


async def test_images_of_all_colours_are_edited(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    rgb = Image.fromarray(gradient(64, 64))
    deep = gradient(64, 64)[..., 0].astype(np.uint16) * 257
    for image in (
        *(file_of(rgb.convert(mode)) for mode in ("L", "LA", "P", "1", "RGBA")),
        file_of(rgb.convert("CMYK"), "JPEG"),
        file_of(Image.fromarray(deep)),
    ):
        request = await edited(http, fake, image, MASK)
        assert request.output_px == (64, 64)
