"""Edits that need advice: replies that would be too large, and common mistakes."""

from __future__ import annotations

import httpx

from tests.api.edit_calls import (
    EDITS,
    IMAGE,
    PROMPT,
    mask_of,
    parts,
    picture,
    post_form,
    refused_edit,
)
from tests.fakes import FakeDispatcherClient


async def test_defaults_are_no_mistake_where_they_change_nothing(http: httpx.AsyncClient) -> None:
    reply = await post_form(http, paste_back=True, feather_px=0)
    assert reply.status_code == 200, reply.text


async def test_images_that_would_not_fit_into_the_reply_are_not_made(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    """Ray's messages end at 256 MiB."""
    side = 2500
    image, mask = picture(side, side), mask_of((0, 0, 16, 16), side, side)
    code = "reply_too_large"
    fields, num_offers = {"crop": "auto", "n": 8}, len(fake.offered)
    message = await refused_edit(http, "response_format", image, mask, code=code, **fields)
    assert "8 images of 2500x2500, 50 million pixels" in message
    assert len(fake.offered) == num_offers
    for fields in (
        {"crop": "auto", "n": 7},
        {"crop": "auto", "n": 8, "response_format": "url"},
    ):
        assert (await post_form(http, image, mask, **fields)).status_code == 200


async def test_advice_for_common_mistakes(http: httpx.AsyncClient) -> None:
    url = "/v1/images/generations"
    reply = await http.post(EDITS, json={"prompt": PROMPT, "image": "photo.PNG"})
    assert "'photo.PNG' seems to be a file's name" in reply.json()["error"]["message"]
    reply = await http.post(EDITS, files=parts({}, {"prompt": PROMPT, "image": "photo.png"}))
    assert "-F image=@photo.png" in reply.json()["error"]["message"]
    reply = await http.post(url, data={"prompt": PROMPT})
    assert "(curl -d takes it from -H)" in reply.json()["error"]["message"]
    reply = await http.post(url, files=parts({"image": IMAGE}, {"prompt": PROMPT}))
    assert "forms are taken by /v1/images/edits" in reply.json()["error"]["message"]
