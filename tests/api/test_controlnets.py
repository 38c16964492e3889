"""Calls that name ControlNets: what becomes of them, and what is refused before any work."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image

from ray_cluster.imaging.detectors import canny_edges
from ray_cluster.imaging.edit_images import edit_pixels
from ray_cluster.policies.fidelity import FewerSteps, StepTable
from ray_cluster.requests import ControlNetUse
from tests.api.checks import URL, check_error, error_of
from tests.api.controlnet_calls import (
    RED,
    SKETCH,
    SKETCH_PIXELS,
    controls_fake,
    controls_http,
    entry,
    map_of,
)
from tests.api.edit_calls import (
    EDITS,
    IMAGE,
    MASK,
    VARIATIONS,
    coded,
    mask_of,
    parts,
    picture,
    ref_of,
)
from tests.fakes import FakeDispatcherClient, completed
from tests.imaging.hostile import bombs
from tests.imaging.pictures import file_of, gradient


@pytest.fixture
def fake() -> FakeDispatcherClient:
    return controls_fake()


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
async def http(fake: FakeDispatcherClient, folder: str) -> AsyncIterator[httpx.AsyncClient]:
    async with controls_http(fake, folder, max_body_bytes=1 << 20) as client:
        yield client


def resized(pixels: Any, width: int, height: int) -> Any:
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


async def test_controlnets_go_into_the_request_with_their_maps(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, folder: str
) -> None:
    two = [
        entry(preprocess="canny", scale=0.8, start=0.1, end=0.6),
        entry("layout", picture(64, 64)),
    ]
    reply = await http.post(URL, json={**RED, "n": 2, "size": "96x64", "controlnets": two})
    assert reply.status_code == 200, reply.text
    said = [
        {"name": "edges", "scale": 0.8, "start": 0.1, "end": 0.6, "preprocess": "canny"},
        {"name": "layout", "scale": 1.0, "start": 0.0, "end": 1.0, "preprocess": "none"},
    ]
    assert [one["controlnets"] for one in reply.json()["data"]] == [said, said]
    first, second = fake.offered[0]
    assert first.add_ons == second.add_ons
    edges = first.add_ons.controls[0]
    assert edges == ControlNetUse(
        "edges", edges.image, 0.8, 0.1, 0.6, "canny", ref_of(SKETCH).sha256
    )
    # what was sent is no template: it takes the size of the work, whatever its proportions
    wanted = canny_edges(resized(SKETCH_PIXELS, 96, 64))
    assert wanted.any()
    assert np.array_equal(map_of(folder, first), np.repeat(wanted[..., None], 3, 2) * 255)
    assert np.array_equal(map_of(folder, first, 1), resized(gradient(64, 64), 96, 64))
    assert first.view(arrival_s=0, deadline_s=1).controls == ("edges", "layout")
    recipe = json.loads(first.recipe()["controlnets"])
    digests = [
        {"image_sha256": use.sent_sha256, "map_sha256": use.image.sha256}
        for use in first.add_ons.controls
    ]
    assert recipe == [one | more for one, more in zip(said, digests, strict=True)]
    without = (await http.post(URL, json={**RED, "controlnets": []})).json()
    assert "controlnets" not in without["data"][0]
    assert "controlnets" not in fake.offered[1][0].recipe()


async def test_one_may_be_named_twice_and_what_is_null_is_absent(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    nulls = dict.fromkeys(("preprocess", "scale", "start", "end"))
    twice = [entry(**nulls), entry(image=picture(32, 32), scale=0)]
    reply = await http.post(URL, json={**RED, "controlnets": twice})
    assert reply.status_code == 200, reply.text
    first, second = fake.offered[0][0].add_ons.controls
    assert (first.name, first.scale, second.name, second.scale) == ("edges", 1, "edges", 0)
    assert first.image != second.image


@pytest.mark.parametrize(
    "image",
    [
        coded(SKETCH),
        f"data:image/png;base64,{coded(SKETCH)}",
        {"image_url": f"data:image/png;base64,{coded(SKETCH)}"},
    ],
    ids=["base64", "data URL", "OpenAI's object"],
)
async def test_an_image_comes_in_any_way_that_edits_take(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, image: object
) -> None:
    reply = await http.post(URL, json={**RED, "controlnets": [{"name": "edges", "image": image}]})
    assert reply.status_code == 200, reply.text
    assert fake.offered[0][0].add_ons.controls[0].sent_sha256 == ref_of(SKETCH).sha256


async def test_a_large_body_is_taken_where_a_controlnet_has_an_image(
    fake: FakeDispatcherClient, folder: str
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    async with controls_http(fake, folder, max_body_bytes=4096) as http:
        large = entry(image=file_of(noise))
        reply = await http.post(URL, json={**RED, "controlnets": [large]})
        assert reply.status_code == 200, reply.text
        for body in ({}, {"controlnets": [{"name": "edges"}]}, {"controlnets": 5}):
            reply = await http.post(URL, json={"prompt": "a" * 5000, **body})
            check_error(reply, 413, code="body_too_large")


def cases() -> list[tuple[object, str, str, str]]:
    def one(**more: Any) -> list[dict[str, Any]]:
        return [{**entry(), **more}]

    return [
        (one(name="egdes"), "[0].name", "controlnet_not_found", "Did you mean 'edges'?"),
        (one(name="zzz"), "[0].name", "controlnet_not_found", "edges, layout, poses, tokens"),
        (one(name="poses"), "[0].name", "controlnet_of_another_model", "made for late, and"),
        (one(name=""), "[0].name", "invalid_value", "not empty"),
        (one(name=5), "[0].name", "invalid_type", "given 5"),
        ([{"image": coded(SKETCH)}], "[0].name", "missing_required_parameter", "is required"),
        ([entry(), {"name": "edges"}], "[1].image", "missing_required_parameter", "required"),
        (one(image=5), "[0].image", "invalid_type", "given 5"),
        (one(image=["a"]), "[0].image", "invalid_type", "an array"),
        (one(image={"url": "a"}), "[0].image", "invalid_value", "'image_url' or 'file_id'"),
        (one(image="https://a.org/b.png"), "[0].image", "invalid_value", "does not fetch"),
        (one(image="no base64"), "[0].image", "invalid_value", "base64"),
        (one(image="sketch.png"), "[0].image", "invalid_value", "seems to be a file's name"),
        (one(image="@sketch"), "[0].image", "invalid_value", "only forms have parts"),
        (one(image="file-1"), "[0].image", "file_not_found", "does not exist"),
        (one(image={"file_id": 7}), "[0].image", "invalid_value", "no id of a file"),
        (one(image=coded(b"no image at all")), "[0].image", "invalid_image", "PNG, JPEG, WebP"),
        (one(image=coded(SKETCH[:-40])), "[0].image", "invalid_image", "cannot be decoded"),
        (one(preprocess="cany"), "[0].preprocess", "invalid_value", "Did you mean 'canny'?"),
        (one(preprocess="zzz"), "[0].preprocess", "invalid_value", "none, canny, invert"),
        (one(preprocess="openpose"), "[0].preprocess", "detector_unavailable", "[preprocessors]"),
        (one(preprocess=True), "[0].preprocess", "invalid_type", "given true"),
        (one(scale=2.1), "[0].scale", "invalid_value", "at most 2; given 2.1"),
        (one(scale=-0.1), "[0].scale", "invalid_value", "at least 0"),
        (one(scale="0.8"), "[0].scale", "invalid_type", "Write 0.8 without quotes"),
        (one(start=1), "[0].start", "invalid_value", "below 1"),
        (one(start=-0.1), "[0].start", "invalid_value", "at least 0"),
        (one(end=0), "[0].end", "invalid_value", "greater than 0"),
        (one(end=1.1), "[0].end", "invalid_value", "at most 1"),
        (one(start=0.5, end=0.5), "[0].start", "invalid_value", "from 0.5 to 0.5"),
        ([entry(), entry(start=0.5, end=0.2)], "[1].start", "invalid_value", "below 'end'"),
        (one(weight=1), "[0].weight", "unknown_parameter", "Did you mean 'scale'?"),
        (one(x=1), "[0].x", "unknown_parameter", "name, preprocess, scale, start, end, image"),
        ([entry()] * 4, "", "invalid_value", "must be a list of at most 3; given"),
        (["edges"], "", "invalid_type", "a list of objects"),
        (entry(), "", "invalid_type", "a list"),
        ("edges", "", "invalid_type", "a list"),
    ]


@pytest.mark.parametrize(
    ("controlnets", "place", "code", "said"),
    cases(),
    ids=[f"{place} {said}" for _, place, _, said in cases()],
)
async def test_a_wrong_controlnet_is_refused_by_its_field(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    controlnets: object,
    place: str,
    code: str,
    said: str,
) -> None:
    reply = await http.post(URL, json={**RED, "controlnets": controlnets})
    check_error(reply, 400, code=code, param=f"controlnets{place}")
    message = error_of(reply)["message"]
    assert said in message
    assert f"controlnets{place}" in message
    assert fake.offered == []


async def test_nothing_is_stored_of_a_call_that_is_wrong_elsewhere(
    http: httpx.AsyncClient, folder: str
) -> None:
    for more in (
        {"controlnets": [entry(), entry(scale=9)]},
        {"controlnets": [entry(), entry("none")]},
        {"controlnets": [entry()], "sedd": 1},
    ):
        assert (await http.post(URL, json={**RED, **more})).status_code == 400
    assert os.listdir(folder) == []


async def test_bombs_and_animations_are_refused_by_the_entry(
    fake: FakeDispatcherClient, folder: str
) -> None:
    async with controls_http(fake, folder, max_input_pixels=4000) as http:
        moving = Image.new("RGB", (8, 8))
        path = Path(folder) / "a.webp"
        moving.save(path, save_all=True, append_images=[Image.new("RGB", (8, 8), "red")])
        large = [picture(64, 64), path.read_bytes(), *bombs()[:2]]
        for image in large:
            reply = await http.post(URL, json={**RED, "controlnets": [entry(image=image)]})
            check_error(reply, 400, code="invalid_image", param="controlnets[0].image")
    assert fake.offered == []


async def test_diffusion_transformers_are_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    body = {**RED, "model": "flux", "controlnets": [entry("tokens")]}
    reply = await http.post(URL, json=body)
    check_error(reply, 400, code="controlnet_of_another_model", param="controlnets[0].name")
    assert "flux, a diffusion transformer" in error_of(reply)["message"]
    assert fake.offered == []


async def test_a_fidelity_that_was_not_measured_with_them_is_refused(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    table = StepTable("ddim", 9.0, (FewerSteps(10, 5, 3),))
    fake.profiles["shapes"] = replace(fake.profiles["shapes"], fewer_steps=table)
    body = {**RED, "sampler": "ddim", "num_inference_steps": 10}
    assert (await http.post(URL, json={**body, "fidelity": "fast"})).status_code == 200
    for name, value in {"fidelity": "fast", "allow": ["fidelity"]}.items():
        reply = await http.post(URL, json={**body, name: value, "controlnets": [entry()]})
        check_error(reply, 400, code="fidelity_not_offered", param=name)
    exact = {**body, "fidelity": "exact", "controlnets": [entry()]}
    assert (await http.post(URL, json=exact)).status_code == 200
    # what fewer steps lose is not known, either
    fake.outcome = lambda request: replace(completed(request), num_steps=5)
    reply = await http.post(URL, json={**exact, "min_inference_steps": 5})
    told = reply.json()["data"][0]["fidelity"]
    assert (told["steps_computed"], told["got"], told["budget_spent"]) == (5, None, None)


# edits


async def test_the_map_of_an_edit_is_of_what_the_model_sees(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, folder: str
) -> None:
    # larger than the template: brought to its size, then cut as that is
    guide = gradient(256, 192)
    body = {
        **RED,
        "image": coded(picture(128, 96)),
        "mask": coded(mask_of((40, 30, 24, 24), 128, 96)),
        "crop": "auto",
        "controlnets": [entry(image=file_of(guide))],
    }
    reply = await http.post(EDITS, json=body)
    assert reply.status_code == 200, reply.text
    request = fake.offered[0][0]
    assert request.edit is not None
    assert request.edit.window is not None
    wanted = edit_pixels(file_of(guide), None, request.edit, request.size_px).work
    assert np.array_equal(map_of(folder, request), wanted)
    assert len(request.inputs) == 3


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ('[{"name": "edges"', "invalid_json", "at line 1 column 18"),
        ('[{"name": "edges", "scale": NaN}]', "invalid_json", "NaN is not a JSON number"),
        ("[" * 100_000, "invalid_json", "nested too deeply"),
        ('[{"name": "edges", "name": "layout"}]', "duplicate_parameter", "'name' is given more"),
    ],
)
async def test_what_is_no_json_in_a_form_is_refused_with_the_reason(
    http: httpx.AsyncClient, text: str, code: str, said: str
) -> None:
    files = {"image": ("a.png", IMAGE, "image/png")}
    reply = await http.post(EDITS, files=files, data={**RED, "controlnets": text})
    check_error(reply, 400, code=code)
    assert said in reply.json()["error"]["message"]


async def test_forms_name_parts_and_json_holds_images_to_the_same_end(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    control = {"name": "edges", "preprocess": "canny", "scale": 0.5}
    files = {"image": IMAGE, "mask": MASK, "sketch": SKETCH}
    chosen = [{**control, "image": "@sketch"}, {"name": "layout", "image": "@sketch"}]
    form = await http.post(EDITS, files=parts(files, {**RED, "controlnets": chosen}))
    # texts may come first
    turned = parts(files, {**RED, "controlnets": chosen})[::-1]
    form_again = await http.post(EDITS, files=turned)
    inside = [{**one, "image": coded(SKETCH)} for one in chosen]
    as_json = {**RED, "image": coded(IMAGE), "mask": coded(MASK), "controlnets": inside}
    json_reply = await http.post(EDITS, json=as_json)
    in_form = {**RED, "controlnets": inside}
    texts = await http.post(EDITS, files=parts({"image": IMAGE, "mask": MASK}, in_form))
    vary = await http.post(VARIATIONS, json={"image": coded(IMAGE), "controlnets": inside})
    for reply in (form, form_again, json_reply, texts, vary):
        assert reply.status_code == 200, reply.text
        assert [one["name"] for one in reply.json()["data"][0]["controlnets"]] == [
            "edges",
            "layout",
        ]
    assert len({offer[0].add_ons for offer in fake.offered}) == 1


@pytest.mark.parametrize(
    ("files", "fields", "param", "said"),
    [
        ({"sketch": SKETCH}, {}, "sketch", "a file that nothing names"),
        (
            {"sketch": SKETCH, "other": SKETCH},
            {"controlnets": [{"name": "edges", "image": "@sketch"}]},
            "other",
            "'image': '@other'",
        ),
        (
            {},
            {"controlnets": [{"name": "edges", "image": "@sketch"}]},
            "controlnets[0].image",
            "the form has no such file",
        ),
        ({"sketch": b"no image at all"}, {}, "sketch", "PNG, JPEG, WebP"),
        ({"seed": SKETCH}, {}, "seed", "must be a text"),
        ({"a[]": SKETCH}, {}, "a[]", "must be a text"),
        (dict.fromkeys("abcd", SKETCH), {}, "d", "must be a text"),
        ({"svg": SKETCH}, {}, "svg", "not offered"),
        ({}, {"controlnets[0][name]": "edges"}, "controlnets[0][name]", "as one text of JSON"),
        ({}, {"controlnets[][name]": "edges"}, "controlnets[][name]", "as one text of JSON"),
        ({}, {"controlnets": "edges"}, "controlnets", "must be a list"),
    ],
)
async def test_wrong_parts_of_a_form_are_refused_by_name(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    files: dict[str, bytes],
    fields: dict[str, Any],
    param: str,
    said: str,
) -> None:
    reply = await http.post(EDITS, files=parts({"image": IMAGE, **files}, {**RED, **fields}))
    check_error(reply, 400, param=param)
    assert said in error_of(reply)["message"]
    assert fake.offered == []


async def test_a_file_sent_twice_under_one_name_is_refused(http: httpx.AsyncClient) -> None:
    sent = parts({"image": IMAGE, "sketch": SKETCH}, RED)
    reply = await http.post(EDITS, files=[*sent, ("sketch", ("upload", SKETCH))])
    check_error(reply, 400, code="duplicate_parameter", param="sketch")


def test_the_schema_has_the_images_and_the_bounds(app: FastAPI) -> None:
    posts = {path: one["post"] for path, one in app.openapi()["paths"].items() if "post" in one}
    body = posts["/v1/images/generations"]["requestBody"]["content"]["application/json"]["schema"]
    kinds = body["properties"]["controlnets"]["anyOf"]
    field = next(one for one in kinds if one["type"] == "array")
    assert field["maxItems"] == 3
    assert field["items"]["required"] == ["name", "image"]
    scale = next(one for one in field["items"]["properties"]["scale"]["anyOf"] if "maximum" in one)
    assert (scale["minimum"], scale["maximum"]) == (0, 2)
    for path in ("/v1/images/edits", "/v1/jobs"):
        form = posts[path]["requestBody"]["content"]["multipart/form-data"]
        assert form["encoding"]["controlnets"] == {"contentType": "application/json"}
