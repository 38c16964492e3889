"""The texts of a form as values: which are read as what JSON has, and which are refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.api.conftest import app_of, shapes_config, shapes_profile
from tests.api.edit_calls import IMAGE, MASK, post_form, post_json, refused_edit
from tests.fakes import FakeDispatcherClient


@pytest.fixture(scope="module")
def fake() -> FakeDispatcherClient:
    return FakeDispatcherClient(shapes_profile())


@pytest.fixture(scope="module")
def app(fake: FakeDispatcherClient) -> FastAPI:
    """One for all calls."""
    return app_of(fake, shapes_config())


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("n", "1.0", "invalid_type"),
        ("n", "1e400", "invalid_type"),
        ("n", "nan", "invalid_type"),
        ("n", "0x1", "invalid_type"),
        ("n", "01", "invalid_type"),
        ("n", " 1 2", "invalid_type"),
        ("n", "True", "invalid_type"),
        ("n", '"1"', "invalid_type"),
        ("n", "{}", "invalid_type"),
        ("n", '"\\ud800"', "invalid_value"),
        ("n", "9" * 30, "invalid_value"),
        pytest.param("n", "9" * 4050, "invalid_value", id="n-thousands of digits"),
        pytest.param("n", "[" * 3000, "invalid_json", id="n-nested"),
        ("seed", str(2**63), "invalid_value"),
        ("seed", "-1", "invalid_value"),
        ("strength", "Infinity", "invalid_type"),
        ("strength", "-1e400", "invalid_value"),
        pytest.param("strength", "9" * 400, "invalid_value", id="strength-beyond floats"),
        ("strength", "0,5", "invalid_type"),
        ("strength", "[]", "invalid_type"),
        ("strength", "true", "invalid_type"),
        ("stream", "TRUE", "invalid_type"),
        ("stream", "1", "invalid_type"),
        ("paste_back", "0", "invalid_type"),
        ("size", "null", "invalid_value"),
        ("crop", "True", "invalid_value"),
        ("allow", '["step"]', "invalid_value"),
        ("allow", '["steps"', "invalid_json"),
        ("allow", '["\\ud800"]', "invalid_value"),
        ("allow", '{"steps": true}', "invalid_type"),
        ("images", "[]", "unknown_parameter"),
        ("mask_image", "a", "unknown_parameter"),
        ("\u00fc", "a", "unknown_parameter"),
    ],
)
async def test_a_text_that_is_no_such_value_is_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str, text: str, code: str
) -> None:
    num_offered = len(fake.offered)
    message = await refused_edit(http, name, IMAGE, MASK, code=code, **{name: text})
    # however long the text is
    assert len(message) < 1000
    assert len(fake.offered) == num_offered


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("n", "2", 2),
        ("n", "null", None),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("strength", "1", 1.0),
        ("strength", "5e-1", 0.5),
        ("strength", " 0.5 ", 0.5),
        ("paste_back", "False", False),
        ("paste_back", "true", True),
        ("metadata", "False", False),
        ("size", "64x96", "64x96"),
        ("allow", "null", None),
        # texts stay texts
        ("prompt", "5", "5"),
        ("prompt", "null", "null"),
        ("prompt", '"a"', '"a"'),
        ("prompt", "True", "True"),
        # what is left empty is absent
        ("negative_prompt", "", None),
        ("n", "", None),
        ("paste_back", "", None),
        ("quality", "", None),
        ("negative_prompt", "[]", "[]"),
    ],
)
async def test_a_form_has_the_values_that_json_has(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str, text: str, value: object
) -> None:
    made: list[Any] = []
    for post, given in ((post_form, text), (post_json, value)):
        reply = await post(http, IMAGE, MASK, **{"seed": 7, name: given})
        assert reply.status_code == 200, reply.text
        made.append([(one.seed, one.recipe(), one.output) for one in fake.offered[-1]])
    assert made[0] == made[1]


async def test_a_name_that_is_nearly_that_of_an_image_is_told(http: httpx.AsyncClient) -> None:
    for given, near in (("imgae", "image"), ("mask_image", "mask"), ("init_image", "image")):
        message = await refused_edit(http, given, code="unknown_parameter", **{given: "a"})
        assert f"Did you mean {near!r}?" in message
