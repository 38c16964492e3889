"""Variations, and inpainting models, which make none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.api.checks import URL, check_error, error_of
from tests.api.conftest import shapes_profile
from tests.api.edit_calls import EDITS, IMAGE, JOBS, MASK, PROMPT, VARIATIONS, coded, parts
from tests.fakes import FakeDispatcherClient


@pytest.mark.parametrize(
    ("fields", "strength"),
    [
        ({}, 0.6),
        # the default, as for edits
        ({"input_fidelity": "low"}, 0.6),
        ({"input_fidelity": "high"}, 0.4),
        ({"strength": 0.7}, 0.7),
        ({"strength": 1}, 1.0),
        ({"prompt": PROMPT}, 0.6),
    ],
)
async def test_a_variation_is_nearer_to_the_image_than_an_edit(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, fields: dict[str, Any], strength: float
) -> None:
    for call in (
        {"files": parts({"image": IMAGE}, fields)},
        {"json": {"image": coded(IMAGE), **fields}},
    ):
        reply = await http.post(VARIATIONS, **call)
        assert reply.status_code == 200, reply.text
        [request] = fake.offered[-1]
        assert request.edit is not None
        assert (request.edit.strength, request.edit.mask) == (strength, None)
        assert request.prompt == fields.get("prompt", "")


@pytest.mark.parametrize("name", ["feather_px", "paste_back", "crop"])
async def test_what_needs_a_mask_is_refused(http: httpx.AsyncClient, name: str) -> None:
    value = {"feather_px": 2, "paste_back": False, "crop": "auto"}[name]
    reply = await http.post(VARIATIONS, files=parts({"image": IMAGE}, {name: value}))
    check_error(reply, 400, param=name)


@pytest.mark.parametrize("url", [EDITS, VARIATIONS, JOBS])
async def test_an_inpainting_model_makes_no_edit_without_a_mask(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, url: str
) -> None:
    fake.profiles = {"shapes": replace(shapes_profile(), edits="masked")}
    for call in (
        {"files": parts({"image": IMAGE}, {"prompt": PROMPT})},
        {"json": {"image": coded(IMAGE), "prompt": PROMPT}},
    ):
        reply = await http.post(url, **call)
        check_error(reply, 400, param="mask", code="missing_required_parameter")
        assert "shapes is an inpainting model" in error_of(reply)["message"]
    assert fake.offered == []


@pytest.mark.parametrize("url", [URL, JOBS])
async def test_an_inpainting_model_makes_nothing_from_text(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, url: str
) -> None:
    fake.profiles = {"shapes": replace(shapes_profile(), edits="masked")}
    for fields in ({}, {"stream": True} if url == URL else {"n": 2}):
        reply = await http.post(url, json={"prompt": PROMPT, **fields})
        check_error(reply, 400, param="model")
        assert EDITS in error_of(reply)["message"]
    assert fake.offered == []


async def test_an_inpainting_model_that_is_called_for_variations_names_edits(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles = {"shapes": replace(shapes_profile(), edits="masked")}
    reply = await http.post(VARIATIONS, files=parts({"image": IMAGE, "mask": MASK}, {}))
    check_error(reply, 400, code="unsupported_parameter", param="mask")
    assert EDITS in error_of(reply)["message"]
