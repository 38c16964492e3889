"""Enlarged images through the service: as Pillow enlarges them, whoever has made them."""

from __future__ import annotations

import base64
import io
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.cell.local_service import LocalService
from tests.e2e.cascade_calls import call
from tests.e2e.edit_templates import mask_png
from tests.e2e.jobs import create, images_of
from tests.e2e.service import HEADERS, images, post

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.timeout(400)]

# other images in a step change the last bit of a float, and so a pixel by one
MOST_APART = 3


def is_enlarged(large: bytes, small: bytes, factor: int, *, most_apart: int = MOST_APART) -> bool:
    """Whether one image is the other, enlarged as Pillow does it."""
    one, other = (Image.open(io.BytesIO(data)).convert("RGB") for data in (large, small))
    size = other.width * factor, other.height * factor
    wanted = other.resize(size, Image.Resampling.LANCZOS)
    apart = np.abs(np.asarray(one).astype(int) - np.asarray(wanted).astype(int))
    return bool(apart.max() <= most_apart)


def leftovers(service: LocalService) -> list[str]:
    """Images of earlier stages in the result store, once nothing is deleted any more."""
    folder, deadline_s = service.folder / "store" / "results", time.monotonic() + 10
    while (left := [path.name for path in Path(folder).rglob("*.candidate*")]) and (
        time.monotonic() < deadline_s
    ):
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("factor", [2, 4])
def test_an_image_is_enlarged_as_pillow_does_it(service: LocalService, factor: int) -> None:
    [plain] = images(post(service, seed=3, num_inference_steps=2))
    reply = post(service, seed=3, num_inference_steps=2, upscale=factor)
    [large] = images(reply)
    assert is_enlarged(large, plain, factor)
    assert reply.json()["size"] == f"{64 * factor}x{64 * factor}"
    timing = reply.json()["data"][0]["timing"]
    assert timing["denoise_s"] > 0
    assert timing["upscale_s"] > 0
    assert leftovers(service) == []


def test_images_of_a_job_are_enlarged(service: LocalService) -> None:
    def made(**more: Any) -> dict[int, bytes]:
        jobs = [create(service, seed, num_inference_steps=2, **more) for seed in (5, 6)]
        return images_of(service, jobs)

    plain, large = made(), made(upscale=2)
    assert plain.keys() == large.keys() == {5, 6}
    assert all(is_enlarged(large[seed], plain[seed], 2) for seed in plain)
    assert leftovers(service) == []


@pytest.mark.parametrize(
    ("output_format", "most_apart"), [("jpeg", 60), ("webp", 60), ("png", MOST_APART)]
)
def test_the_last_worker_writes_the_format_that_was_asked_for(
    service: LocalService, output_format: str, most_apart: int
) -> None:
    [plain] = images(post(service, seed=3, num_inference_steps=2))
    more = {"upscale": 2, "output_format": output_format}
    [large] = images(post(service, seed=3, num_inference_steps=2, **more))
    assert Image.open(io.BytesIO(large)).format == output_format.upper()
    assert is_enlarged(large, plain, 2, most_apart=most_apart)


def test_what_a_cascade_chooses_is_enlarged(service: LocalService) -> None:
    stages = set()
    for seed in range(2):
        plain, small = call(service, seed)
        found, large = call(service, seed, upscale=2)
        assert found["cascade"]["stage"] == plain["cascade"]["stage"]
        assert is_enlarged(large, small, 2)
        stages.add(found["cascade"]["stage"])
    assert stages == {"light", "heavy"}
    assert leftovers(service) == []


def test_an_edit_is_enlarged_with_what_it_has_kept(service: LocalService) -> None:
    [template] = images(post(service, seed=3, num_inference_steps=2))
    inside = np.zeros((64, 64), bool)
    inside[16:40, 16:40] = True
    body = {
        "prompt": "a small green star",
        "image": base64.b64encode(template).decode(),
        "mask": base64.b64encode(mask_png(inside)).decode(),
        "seed": 4,
        "num_inference_steps": 2,
    }
    replies = [
        httpx.post(f"{service.url}/v1/images/edits", json=body | more, headers=HEADERS, timeout=120)
        for more in ({}, {"upscale": 2})
    ]
    small, large = (images(reply)[0] for reply in replies)
    assert is_enlarged(large, small, 2)


def test_previews_come_before_the_enlarged_image(service: LocalService) -> None:
    fields = {"seed": 3, "num_inference_steps": 6, "stream": True, "partial_images": 2}
    text = post(service, upscale=2, **fields).text
    assert text.count("event: image_generation.partial_image") == 2
    assert text.count("event: image_generation.completed") == 1
    assert leftovers(service) == []
