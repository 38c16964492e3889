"""Calls with several pictures: what a model that looks at them gets, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI

from ray_cluster.config.loading import ClusterConfig
from ray_cluster.requests import ImageRequest, Reference
from tests.api.checks import check_error, error_of
from tests.api.conftest import Serve, app_of, http_of, shapes_profile
from tests.api.edit_calls import (
    EDITS,
    IMAGE,
    JOBS,
    MASK,
    PROMPT,
    VARIATIONS,
    WHOLE_MASK,
    coded,
    mask_of,
    parts,
    picture,
    ref_of,
)
from tests.fakes import FakeDispatcherClient, model_profile

# larger than what is seen of it, no multiple of 16, and a strip
LARGE, ODD, STRIP = picture(256, 128), picture(50, 70), picture(4, 200)
PICTURES = (LARGE, ODD, STRIP)


@pytest.fixture
def fake() -> FakeDispatcherClient:
    """A model without references, one with nothing else, and one with edits and references."""
    eyes = replace(
        model_profile("eyes"),
        size_multiple_px=16,
        edits="none",
        max_references=16,
        max_reference_px=128 * 64,
    )
    both = replace(eyes, model="both", edits="any", max_references=3, max_masked_references=2)
    square = replace(eyes, model="square", min_reference_side_px=64, max_reference_ratio=8)
    return FakeDispatcherClient(shapes_profile(), eyes, both, square)


@pytest.fixture
def app(fake: FakeDispatcherClient, config: ClusterConfig) -> FastAPI:
    limits = config.limits.model_copy(update={"max_body_bytes": 1 << 20})
    return app_of(fake, config.model_copy(update={"limits": limits}))


@pytest.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(app, raise_app_exceptions=False) as client:
        yield client


def form(images: tuple[bytes, ...], name: str = "image[]", **fields: Any) -> list[tuple[str, Any]]:
    own = {"prompt": PROMPT, "model": "eyes"} | fields
    mask = own.pop("mask", None)
    files = [(name, ("upload", one)) for one in images]
    return [*files, *parts({} if mask is None else {"mask": mask}, own)]


async def sent(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, images: tuple[bytes, ...], **fields: Any
) -> ImageRequest:
    reply = await http.post(EDITS, files=form(images, **fields))
    assert reply.status_code == 200, reply.text
    return fake.offered[-1][0]


def seen(*sizes: tuple[int, int]) -> tuple[Reference, ...]:
    return tuple(Reference(ref_of(one), *size) for one, size in zip(PICTURES, sizes, strict=False))


async def test_a_model_looks_at_all_pictures(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    request = await sent(http, fake, PICTURES, input_fidelity="high")
    assert request.edit is None
    assert request.references == seen((128, 64), (48, 64), (16, 192))
    # that of the first, as it is seen
    assert request.size_px == (128, 64)
    view = request.view(arrival_s=0.0, deadline_s=1.0)
    assert view.reference_px == 128 * 64 + 48 * 64 + 16 * 192
    digests = [one.image.sha256 for one in request.references]
    assert json.loads(request.recipe()["references_sha256"]) == digests
    assert (await sent(http, fake, (ODD,), size="auto")).size_px == (48, 64)
    # the strip is brought into the bounds
    assert (await sent(http, fake, (STRIP,))).size_px == (32, 256)
    assert (await sent(http, fake, (ODD,), size="64x96")).size_px == (64, 96)
    # too small for the model, and as long as may be
    [dot] = (await sent(http, fake, (picture(1, 1),), model="square")).references
    assert (dot.width_px, dot.height_px) == (64, 64)
    assert (await sent(http, fake, (picture(4, 32),), model="square")).size_px == (64, 128)


async def test_every_spelling_is_the_same_call(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    wanted = (await sent(http, fake, PICTURES)).references
    assert (await sent(http, fake, PICTURES, name="image")).references == wanted
    texts = [coded(one) for one in PICTURES]
    objects = [{"image_url": f"data:image/png;base64,{one}"} for one in texts]
    upload = await http.post(
        "/v1/files", files={"file": ("a.png", LARGE)}, data={"purpose": "vision"}
    )
    with_file = [{"file_id": upload.json()["id"]}, *texts[1:]]
    for more in ({"images": objects}, {"image": texts}, {"images": with_file}):
        body = {"prompt": PROMPT, "model": "eyes"} | more
        assert (await http.post(EDITS, json=body)).status_code == 200
        assert fake.offered[-1][0].references == wanted


async def test_a_mask_is_of_the_first(http: httpx.AsyncClient, fake: FakeDispatcherClient) -> None:
    request = await sent(http, fake, (IMAGE, ODD), model="both", mask=MASK, feather_px=2)
    assert request.edit is not None
    assert (request.edit.image, request.edit.mask) == (ref_of(IMAGE), ref_of(MASK))
    assert [one.image for one in request.references] == [ref_of(IMAGE), ref_of(ODD)]
    assert {"image_sha256", "mask_sha256", "references_sha256"} < request.recipe().keys()
    request = await sent(http, fake, (IMAGE, ODD), model="both", mask=WHOLE_MASK)
    assert (request.edit, len(request.references)) == (None, 2)
    # how far to go from one picture
    request = await sent(http, fake, (IMAGE,), model="both", strength=0.5)
    assert request.edit is not None
    assert request.references == ()


@pytest.mark.parametrize(
    ("images", "fields", "param", "says"),
    [
        ((IMAGE, ODD), {"model": "shapes"}, "image", "shapes takes 1. So many are taken by: eyes"),
        ((IMAGE,) * 4, {"model": "both"}, "image", "takes 3. So many are taken by: eyes"),
        ((IMAGE,) * 17, {}, "image[]", "at most 16 are allowed"),
        ((IMAGE,), {"mask": MASK}, "mask", "changes no part of one"),
        ((IMAGE, ODD), {"mask": mask_of(None, 50, 70), "model": "both"}, "mask", "same size"),
        ((IMAGE,), {"strength": 0.5}, "strength", "eyes looks at whole images"),
        ((IMAGE, ODD), {"strength": 0.5, "model": "both"}, "strength", "if it gets several"),
        ((IMAGE, IMAGE[:99]), {}, "image[1]", ""),
        ((ODD, STRIP), {"model": "square"}, "image[1]", "is 4x200, a longer strip than the 8:1"),
        ((STRIP,), {"model": "square"}, "image", "8:1"),
        ((IMAGE,), {"crop": "auto"}, "crop", "without a mask"),
        ((IMAGE,), {"size": "40x40"}, "size", "multiples of 16"),
        ((IMAGE,), {"fidelity": "fast"}, "fidelity", ""),
    ],
)
async def test_what_is_refused(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    images: tuple[bytes, ...],
    fields: dict[str, Any],
    param: str,
    says: str,
) -> None:
    reply = await http.post(EDITS, files=form(images, **fields))
    check_error(reply, 400, param=param)
    assert says in error_of(reply)["message"]
    assert fake.offered == []


async def test_a_variation_has_one_picture_and_starts_from_it(http: httpx.AsyncClient) -> None:
    reply = await http.post(VARIATIONS, files=form((IMAGE, IMAGE), model="both"))
    check_error(reply, 400, param="image[]")
    reply = await http.post(VARIATIONS, json={"images": [coded(IMAGE)] * 2, "model": "both"})
    check_error(reply, 400, param="images")
    reply = await http.post(VARIATIONS, files=form((IMAGE,)))
    check_error(reply, 400, param="model")
    assert "for variations choose another" in error_of(reply)["message"]
    assert (await http.post(VARIATIONS, files=form((IMAGE,), model="both"))).status_code == 200


async def test_too_many_are_refused_before_any_is_decoded(http: httpx.AsyncClient) -> None:
    broken = [coded(IMAGE[:99])] * 2
    for url in (EDITS, JOBS):
        body = {"prompt": PROMPT, "model": "shapes", "images": broken}
        check_error(await http.post(url, json=body), 400, code="invalid_value", param="images")


async def test_cards_say_how_many(http: httpx.AsyncClient) -> None:
    cards = (await http.get("/v1/models")).json()["data"]
    names = ("edits", "max_input_images", "max_masked_input_images")
    found = {one["id"]: tuple(one[name] for name in names) for one in cards}
    eyes = dict.fromkeys(("eyes", "square"), ("none", 16, 0))
    assert found == {"shapes": ("any", 1, 1), "both": ("any", 3, 2)} | eyes


async def test_fewer_may_be_taken_with_a_mask(http: httpx.AsyncClient) -> None:
    """For a job, too: it would be accepted, and fail."""
    for url in (EDITS, JOBS):
        reply = await http.post(url, files=form((IMAGE,) * 3, model="both", mask=MASK))
        check_error(reply, 400, code="invalid_value", param="image")
        assert "both takes 2 with a mask" in error_of(reply)["message"]


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_the_official_client_sends_several(
    app: FastAPI, fake: FakeDispatcherClient, serve: Serve, count: int
) -> None:
    client = openai.OpenAI(base_url=f"{serve(app)}/v1", api_key="any", max_retries=0)
    images = [picture(16 * (index + 2), 64) for index in range(count)]
    reply = client.images.edit(image=images, prompt=PROMPT, model="eyes")
    assert len(reply.data or ()) == 1
    [request] = fake.offered[-1]
    assert [one.image for one in request.references] == [ref_of(one) for one in images]
