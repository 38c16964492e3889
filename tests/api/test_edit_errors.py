"""What edits refuse, in a form and in JSON: by name, before anything is made."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from ray_cluster.api.schema import REFUSED
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
    mask,
    photo,
    refused,
)
from tests.fakes import FakeDispatcherClient

CALL: dict[str, Any] = {"prompt": PROMPT, "image": photo()}
WITH_MASK: dict[str, Any] = {**CALL, "mask": mask()}


@pytest.mark.parametrize(
    ("fields", "param", "code", "says"),
    [
        ({"strength": 0}, "strength", "invalid_value", "greater than 0"),
        ({"strength": -0.5}, "strength", "invalid_value", "greater than 0"),
        ({"strength": 1.01}, "strength", "invalid_value", "at most 1"),
        ({"strength": True}, "strength", "invalid_type", "number"),
        ({"strength": []}, "strength", "invalid_type", "number"),
        ({"feather_px": -1}, "feather_px", "invalid_value", "at least 0"),
        ({"feather_px": 257}, "feather_px", "invalid_value", "at most 256"),
        ({"feather_px": 1.5}, "feather_px", "invalid_type", "whole number"),
        ({"paste_back": 1}, "paste_back", "invalid_type", "true or false"),
        ({"crop": "all"}, "crop", "invalid_value", "'auto'"),
        ({"input_fidelity": "medium"}, "input_fidelity", "invalid_value", "'high' or 'low'"),
        # what would change nothing
        ({"paste_back": False, "crop": "auto"}, "paste_back", "invalid_value", "'crop'"),
        ({"paste_back": False, "feather_px": 1}, "feather_px", "invalid_value", "paste_back"),
        ({"strength": 1, "input_fidelity": "low"}, "input_fidelity", "invalid_value", "'strength'"),
        # fewer steps were not measured for edits
        ({"fidelity": "balanced"}, "fidelity", "fidelity_not_offered", "min_inference_steps"),
        ({"fidelity": "fast"}, "fidelity", "fidelity_not_offered", "min_inference_steps"),
        ({"allow": ["fidelity"]}, "allow", "fidelity_not_offered", "min_inference_steps"),
        ({"allow": ["steps"]}, "allow", "invalid_value", "min_inference_steps"),
        ({"min_inference_steps": 11}, "min_inference_steps", "invalid_value", "at most"),
        # of every call
        ({"n": 11}, "n", "invalid_value", "at most 10"),
        ({"size": "65x64"}, "size", "invalid_value", "72x64"),
        ({"size": "512x512"}, "size", "invalid_value", "256x256"),
        ({"output_format": "gif"}, "output_format", "invalid_value", "'webp'"),
        ({"background": "transparent"}, "background", "invalid_value", "alpha"),
        ({"partial_images": 1}, "partial_images", "invalid_value", "'stream'"),
        ({"stream": True, "n": 2}, "n", "invalid_value", "'stream'"),
        ({"guidance_scale": 1, "negative_prompt": "b"}, "negative_prompt", "invalid_value", "off"),
        ({"sampler": "pndm"}, "sampler", "invalid_value", "ddim, euler, lcm"),
        ({"prompt": " "}, "prompt", "invalid_value", "blank"),
        ({"prompt": "a" * 201}, "prompt", "string_above_max_length", "200"),
        # other servers' words
        ({"denoising_strength": 0.5}, "denoising_strength", "unknown_parameter", "'strength'"),
        ({"mask_blur": 4}, "mask_blur", "unknown_parameter", "'feather_px'"),
        ({"mask_image": "a"}, "mask_image", "unknown_parameter", "Did you mean 'mask'"),
        ({"imgae": "a"}, "imgae", "unknown_parameter", "Did you mean 'image'"),
    ],
)
@both_ways
async def test_a_wrong_value_is_refused_by_name(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    post: Post,
    fields: dict[str, Any],
    param: str,
    code: str,
    says: str,
) -> None:
    message = await refused(http, fake, post, {**WITH_MASK, **fields}, param, code)
    assert says in message
    assert repr(param) in message


@pytest.mark.parametrize("fields", [{"feather_px": 2}, {"paste_back": True}, {"crop": "auto"}])
@pytest.mark.parametrize("url", [EDITS, VARIATIONS])
@both_ways
async def test_what_needs_a_mask_is_refused_without_one(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    post: Post,
    url: str,
    fields: dict[str, Any],
) -> None:
    [name] = fields
    assert "mask" in await refused(http, fake, post, {**CALL, **fields}, name, url=url)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("url", [EDITS, VARIATIONS, JOBS])
@both_ways
async def test_what_openai_has_and_this_service_has_not_is_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, post: Post, url: str, name: str
) -> None:
    fields = {**CALL, name: {"model": "x"} if name == "svg" else 5}
    assert "not offered" in await refused(
        http, fake, post, fields, name, "unsupported_parameter", url
    )


@pytest.mark.parametrize("name", ["svg[model]", "markup[][box]"])
async def test_it_is_refused_in_the_spelling_of_forms_too(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str
) -> None:
    message = await refused(http, fake, by_form, {**CALL, name: "x"}, name, "unsupported_parameter")
    assert "not offered" in message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        # the smallest schedule of which a step is left
        ({"strength": 0.05}, "'strength' is 0.05, which leaves none of the 10 steps"),
        ({"strength": 0.05}, "Set num_inference_steps to at least 20, or raise the strength."),
        ({"strength": 0.3, "num_inference_steps": 3}, "at least 4,"),
        # none that the sampler has
        ({"strength": 0.001}, "of the schedule. Raise the strength."),
        # and none at all: this must not be searched for
        ({"strength": 1e-300}, "of the schedule. Raise the strength."),
        ({"strength": 5e-324}, "of the schedule. Raise the strength."),
    ],
)
@both_ways
async def test_a_strength_that_leaves_no_step_says_what_would_do(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    post: Post,
    fields: dict[str, Any],
    says: str,
) -> None:
    assert says in await refused(http, fake, post, {**CALL, **fields}, "strength")
    if "at least 20" in says:
        request = await edited(http, fake, post, **fields, num_inference_steps=20)
        assert request.num_steps == 1


# a form's texts


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("n", "", "invalid_type"),
        ("n", "1.0", "invalid_type"),
        ("n", "1e400", "invalid_type"),
        ("n", "nan", "invalid_type"),
        ("n", "9" * 30, "invalid_value"),
        # more digits than Python reads as a number
        pytest.param("n", "9" * 4050, "invalid_value", id="digits"),
        ("n", "0x1", "invalid_type"),
        ("n", "01", "invalid_type"),
        ("n", " 1 2", "invalid_type"),
        ("n", "True", "invalid_type"),
        ("n", '"1"', "invalid_type"),
        ("n", "{}", "invalid_type"),
        ("n", "[" * 3000, "invalid_type"),
        ("n", '"\\ud800"', "invalid_value"),
        ("seed", str(2**63), "invalid_value"),
        ("seed", "-1", "invalid_value"),
        ("strength", "", "invalid_type"),
        ("strength", "NaN", "invalid_type"),
        ("strength", "Infinity", "invalid_type"),
        ("strength", "1e400", "invalid_value"),
        ("strength", "-1e400", "invalid_value"),
        ("strength", "9" * 400, "invalid_value"),
        ("strength", "0,5", "invalid_type"),
        ("stream", "yes", "invalid_type"),
        ("stream", "TRUE", "invalid_type"),
        ("paste_back", "0", "invalid_type"),
        ("paste_back", "", "invalid_type"),
        ("size", "null", "invalid_value"),
        ("quality", "", "invalid_value"),
        ("allow", "steps", "invalid_type"),
        ("allow", '["step"]', "invalid_value"),
        ("allow", '["\\ud800"]', "invalid_value"),
        ("allow[]", "steps", "unknown_parameter"),
        ("\u00fc", "steps", "unknown_parameter"),
    ],
)
async def test_a_text_that_is_no_such_value_is_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str, text: str, code: str
) -> None:
    message = await refused(http, fake, by_form, {**WITH_MASK, name: text}, name, code)
    assert len(message) < 1000


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("n", "2", 2),
        ("n", "null", None),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("strength", "1", 1.0),
        ("strength", "5e-1", 0.5),
        ("paste_back", "False", False),
        ("paste_back", "true", True),
        ("metadata", "False", False),
        ("size", "64x48", "64x48"),
        # texts stay texts
        ("prompt", "5", "5"),
        ("prompt", "null", "null"),
        ("prompt", '"a"', '"a"'),
        ("user", "True", "True"),
        ("negative_prompt", "", ""),
    ],
)
async def test_a_form_has_the_values_that_json_has(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str, text: str, value: object
) -> None:
    same = {**WITH_MASK, "seed": 7}
    for post, given in ((by_form, text), (by_json, value)):
        response = await post(http, EDITS, **{**same, name: given})
        assert response.status_code == 200, response.text
    one, other = ([(r.seed, r.recipe(), r.output) for r in group] for group in fake.offered)
    assert one == other
