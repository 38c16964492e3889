"""What a reply says of a call that was probably meant otherwise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ray_cluster.api.output.warnings import warnings_of
from ray_cluster.requests import AddOns, LoraUse
from tests.api.checks import URL, check_error, error_of
from tests.api.controlnet_calls import RED, SKETCH, controls_fake, controls_http, entry
from tests.api.edit_calls import EDITS, IMAGE, coded, picture
from tests.fakes import FakeDispatcherClient, image_request
from tests.imaging.pictures import file_of


@pytest.fixture
def fake() -> FakeDispatcherClient:
    return controls_fake()


@pytest.fixture
async def http(fake: FakeDispatcherClient, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with controls_http(fake, str(tmp_path), max_body_bytes=1 << 20) as client:
        yield client


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("a circle <lora:pastel:0.8>", "[{'name': 'pastel', 'scale': 0.8}]"),
        ("<LORA:my style v2> a circle", "[{'name': 'my style v2', 'scale': 1}]"),
        ("a <lyco:x:1:2> circle", "[{'name': 'x', 'scale': 1}]"),
        (
            "a (red:1.3) circle",
            "'(red:1.3)' in 'prompt' was read as words: a prompt has no weights",
        ),
        ("a (red, round: .5) circle", "no weights"),
        ("a clock (at 10:30)", ""),
        ("a (red) circle, 3:2, <b>", ""),
    ],
)
def test_what_other_programs_take_out_of_a_prompt_is_told_of(prompt: str, says: str) -> None:
    found = warnings_of(image_request(prompt=prompt))
    assert len(found) == bool(says)
    assert says in "".join(found)


def test_each_is_said_once_and_of_either_prompt() -> None:
    both = image_request(prompt="(a:2) (b:1.1)", negative_prompt="<lora:x>")
    assert [one.split(" was")[0] for one in warnings_of(both)] == [
        "'(a:2)' in 'prompt'",
        "'<lora:x>' in 'negative_prompt'",
    ]
    idle = image_request(add_ons=AddOns(loras=(LoraUse("x", 0.0), LoraUse("x", 0.0))))
    assert warnings_of(idle) == ["The LoRA 'x' has a scale of 0, and changes nothing."]


def noise(side: int = 64) -> bytes:
    return file_of(np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8))


@pytest.mark.parametrize(
    ("image", "is_told"),
    [
        (noise(), True),
        (SKETCH, False),
        # a depth map, in grey
        (file_of(np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 1, 3))), False),
    ],
    ids=["picture", "sketch", "depth"],
)
async def test_a_picture_in_place_of_a_map_is_told_of(
    http: httpx.AsyncClient, image: bytes, is_told: bool
) -> None:
    reply = await http.post(URL, json=RED | {"controlnets": [entry(image=image)]})
    [found] = reply.json()["data"]
    assert ("colours of a picture" in str(found.get("warnings"))) == is_told
    made = await http.post(
        URL, json=RED | {"controlnets": [entry(image=image, preprocess="canny")]}
    )
    assert "warnings" not in made.json()["data"][0]


@pytest.mark.parametrize(
    ("steps", "span", "param"),
    [
        (4, {"end": 0.2}, "end"),
        (4, {"start": 0.3, "end": 0.74}, "end"),
        (4, {"start": 0.76}, "start"),
        (1, {"end": 0.99}, "end"),
        (4, {"end": 0.25}, None),
        (4, {"start": 0.25, "end": 0.5}, None),
        (10, {"start": 0.9}, None),
    ],
)
async def test_a_range_without_a_step_is_refused(
    http: httpx.AsyncClient, steps: int, span: dict[str, Any], param: str | None
) -> None:
    body: dict[str, Any] = RED | {"num_inference_steps": steps, "controlnets": [entry(**span)]}
    reply = await http.post(URL, json=body)
    if param is None:
        assert reply.status_code == 200, reply.text
        return
    check_error(reply, 400, param=f"controlnets[0].{param}")
    assert f"of {steps} none lies within" in error_of(reply)["message"]


async def test_an_edits_range_is_of_the_steps_that_its_strength_leaves(
    http: httpx.AsyncClient,
) -> None:
    body = {"prompt": "x", "image": coded(IMAGE), "num_inference_steps": 10, "strength": 0.3}
    for end, status in ((0.4, 200), (0.3, 400)):
        sent = body | {"controlnets": [entry(image=picture(32, 32), end=end)]}
        assert (await http.post(EDITS, json=sent)).status_code == status
