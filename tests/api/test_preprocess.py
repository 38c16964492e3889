"""Maps on their own, and what a service says of its ControlNets and detectors."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from ray_cluster.api.output.resource_schemas import ControlNetList, PreprocessResponse
from ray_cluster.imaging.detectors import canny_edges
from tests.api.checks import URL, check_error, error_of
from tests.api.conftest import NOW_S
from tests.api.controlnet_calls import (
    RED,
    SKETCH,
    SKETCH_PIXELS,
    controls_fake,
    controls_http,
    entry,
    map_of,
)
from tests.api.edit_calls import coded, parts, picture
from tests.fakes import FakeDispatcherClient

PREPROCESS = "/v1/preprocess"


@pytest.fixture
def fake() -> FakeDispatcherClient:
    return controls_fake()


@pytest.fixture
async def http(fake: FakeDispatcherClient, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with controls_http(fake, str(tmp_path), max_input_pixels=16_000) as client:
        yield client


def pixels_in(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    PreprocessResponse.model_validate(reply.json(), strict=True, extra="forbid")
    [one] = reply.json()["data"]
    with Image.open(io.BytesIO(base64.b64decode(one["b64_json"]))) as image:
        assert (image.format, image.mode) == ("PNG", "RGB")
        return np.array(image)


async def test_a_form_and_json_give_the_same_map(http: httpx.AsyncClient) -> None:
    form = await http.post(PREPROCESS, files=parts({"image": SKETCH}, {"preprocess": "canny"}))
    edges = canny_edges(SKETCH_PIXELS)
    assert edges.any()
    assert np.array_equal(pixels_in(form), np.repeat(edges[..., None], 3, 2) * 255)
    head = {name: form.json()[name] for name in ("created", "preprocess", "size")}
    assert head == {"created": int(NOW_S), "preprocess": "canny", "size": "80x48"}
    image_url = f"data:image/png;base64,{coded(SKETCH)}"
    for image in (coded(SKETCH), image_url, {"image_url": image_url}):
        body = {"image": image, "preprocess": "canny", "size": "auto"}
        assert (await http.post(PREPROCESS, json=body)).json() == form.json()
    sized = await http.post(
        PREPROCESS, json={"image": coded(SKETCH), "preprocess": "none", "size": "96x64"}
    )
    resized = Image.fromarray(SKETCH_PIXELS).resize((96, 64), Image.Resampling.LANCZOS)
    assert np.array_equal(pixels_in(sized), np.array(resized))
    # another form of it: any side, not the model's alone
    odd = {"image": coded(SKETCH), "preprocess": "invert", "size": "33x7"}
    assert pixels_in(await http.post(PREPROCESS, json=odd)).shape == (7, 33, 3)


async def test_its_map_is_that_of_a_call_and_its_id_stands_for_it(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, tmp_path: Path
) -> None:
    body = {"image": coded(SKETCH), "preprocess": "canny", "size": "64x64"}
    made = await http.post(PREPROCESS, json=body)
    file_id = made.json()["data"][0]["file_id"]
    assert (await http.get(f"/v1/files/{file_id}")).status_code == 200
    chosen = [entry(preprocess="canny"), {"name": "edges", "image": file_id}]
    reply = await http.post(URL, json={**RED, "size": "64x64", "controlnets": chosen})
    assert reply.status_code == 200, reply.text
    request = fake.offered[0][0]
    first, second = request.add_ons.controls
    assert first.image == second.image
    assert np.array_equal(map_of(str(tmp_path), request), pixels_in(made))
    again = {"image": {"file_id": file_id}, "preprocess": "none"}
    assert (await http.post(PREPROCESS, json=again)).json()["data"] == made.json()["data"]


@pytest.mark.parametrize(
    ("changes", "param", "code", "said"),
    [
        ({"preprocess": None}, "preprocess", "missing_required_parameter", "which detector"),
        ({"preprocess": "cany"}, "preprocess", "invalid_value", "Did you mean 'canny'?"),
        ({"preprocess": "hed"}, "preprocess", "detector_unavailable", "[preprocessors]"),
        ({"preprocess": 5}, "preprocess", "invalid_type", "given 5"),
        ({"image": None}, "image", "missing_required_parameter", "is required"),
        ({"image": 5}, "image", "invalid_type", "given 5"),
        ({"image": [coded(SKETCH)]}, "image", "invalid_type", "an array"),
        ({"image": coded(b"no image at all")}, "image", "invalid_image", "PNG, JPEG, WebP"),
        ({"image": coded(SKETCH[:-40])}, "image", "invalid_image", "cannot be decoded"),
        ({"image": coded(picture(128, 128))}, "image", "invalid_image", "16384"),
        ({"size": "64"}, "size", "invalid_value", "WIDTHxHEIGHT"),
        ({"size": "0x64"}, "size", "invalid_value", "WIDTHxHEIGHT"),
        ({"size": "999999x999999"}, "size", "invalid_value", "at most 16000"),
        ({"scale": 1}, "scale", "unknown_parameter", "preprocess, size, image"),
        ({"mask": coded(SKETCH)}, "mask", "unknown_parameter", "There are"),
    ],
    ids=range(15),
)
async def test_a_wrong_field_is_refused_by_name(
    http: httpx.AsyncClient, changes: dict[str, Any], param: str, code: str, said: str
) -> None:
    body = {"image": coded(SKETCH), "preprocess": "canny", **changes}
    reply = await http.post(PREPROCESS, json=body)
    check_error(reply, 400, code=code, param=param)
    assert said in error_of(reply)["message"]


async def test_a_wrong_form_is_refused_by_its_part(http: httpx.AsyncClient) -> None:
    for files, fields, param in (
        ({}, {"preprocess": "canny"}, "image"),
        ({"image": SKETCH}, {}, "preprocess"),
        ({"image": SKETCH}, {"preprocess": "canny", "x": "1"}, "x"),
        ({"image": SKETCH, "mask": SKETCH}, {"preprocess": "canny"}, "mask"),
    ):
        reply = await http.post(PREPROCESS, files=parts(files, fields) or {"a": "b"})
        check_error(reply, 400, param=param)
    reply = await http.post(PREPROCESS, content=b"x", headers={"content-type": "image/png"})
    check_error(reply, 415)


async def test_the_list_says_what_calls_may_name(http: httpx.AsyncClient) -> None:
    reply = (await http.get("/v1/controlnets")).json()
    ControlNetList.model_validate(reply, strict=True, extra="forbid")
    known = [(one["name"], one["bases"], one["mode"]) for one in reply["data"]]
    assert known == [
        ("edges", ["shapes"], "service"),
        ("layout", ["shapes", "late"], "local"),
        ("poses", ["late"], "service"),
        ("tokens", ["flux"], "service"),
    ]
    assert [one["description"] for one in reply["data"]] == ["lines, white on black", "", "", ""]
    assert reply["detectors"] == ["none", "canny", "invert", "scribble"]
    models = (await http.get("/v1/models")).json()["data"]
    named = {one["id"]: one["controlnets"] for one in models}
    assert named == {
        "shapes": ["edges", "layout"],
        "late": ["layout", "poses"],
        "flux": ["tokens"],
    }
    one = (await http.get("/v1/models/shapes")).json()
    assert one["controlnets"] == ["edges", "layout"]
