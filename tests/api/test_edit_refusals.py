"""Edits that are refused: each by the name of what is wrong, before anything is made."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ray_cluster.api.app import create_app
from ray_cluster.api.input.sent_images import SentImages
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import RequestFailed
from ray_cluster.policies.edits import computed_steps
from ray_cluster.policies.fidelity import FewerSteps, StepTable
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore
from tests.api.checks import check_error, error_of
from tests.api.conftest import app_of, http_of, shapes_config, shapes_profile
from tests.api.edit_calls import (
    EDITS,
    IMAGE,
    JOBS,
    MASK,
    PROMPT,
    VARIATIONS,
    coded,
    mask_of,
    parts,
    picture,
    post_form,
    post_json,
    refused_edit,
)
from tests.fakes import FakeDispatcherClient, PlainChecks, memory_results, sent_images, settings_for
from tests.imaging.hostile import animation, plain_png, png_of
from tests.imaging.pictures import exif_of, file_of, gradient

OPAQUE = file_of(gradient(64, 64))


def without_bytes(value: Any) -> str:
    """Return a case's name without its files."""
    return value if isinstance(value, str) else ""


@pytest.fixture(scope="module")
def config() -> ClusterConfig:
    return shapes_config()


@pytest.fixture(scope="module")
def fake() -> FakeDispatcherClient:
    """A model of which fewer steps were measured, for images from text."""
    table = StepTable("ddim", 10.0, (FewerSteps(asked=10, balanced=6, fast=3),))
    return FakeDispatcherClient(replace(shapes_profile(), fewer_steps=table))


@pytest.fixture(scope="module")
def app(fake: FakeDispatcherClient, config: ClusterConfig) -> FastAPI:
    """One for all: what is refused leaves nothing behind."""
    images = sent_images("memory://refused")
    return app_of(fake, config, images=images)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("strength", 0, "0"),
        ("strength", 1.01, "1"),
        ("strength", "much", "'much'"),
        ("strength", "NaN", "NaN"),
        ("feather_px", 257, "256"),
        ("feather_px", -1, "0"),
        ("feather_px", 1.5, "1.5"),
        ("paste_back", "yes", "true or false"),
        ("crop", "center", "'auto'"),
        ("input_fidelity", "medium", "'high'"),
        ("n", "two", "'two'"),
        ("strength", "1e999", "finite"),
        ("n", 0, "at least 1"),
        ("n", 11, "at most 10"),
        ("size", "65x64", "72x64"),
        ("size", 64, "WIDTHxHEIGHT"),
        ("seed", 2**63, "given 9223372036854775808"),
        ("allow", "steps", "a list"),
        ("stream", "maybe", "'maybe'"),
        ("prompt", "", "prompt"),
        ("prompt", " ", "blank"),
        ("background", "transparent", "no alpha channel"),
        ("output_format", "gif", "no animations"),
        ("output_format", "svg", "no vector images"),
        ("sampler", "magic", "'magic'"),
        ("num_inference_steps", 101, "from 1 to 100"),
        ("partial_images", 1, "Set stream to true"),
    ],
)
async def test_a_wrong_value_is_refused_by_name(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str, value: Any, says: str
) -> None:
    assert says in await refused_edit(http, name, IMAGE, MASK, **{name: value})
    assert fake.offered == []


@pytest.mark.parametrize(
    "name", ["markup", "complexity", "frame_count", "frame_duration_ms", "svg", "svg[model]"]
)
async def test_what_openai_has_and_this_service_not_is_refused_by_name_in_both_spellings(
    http: httpx.AsyncClient, name: str
) -> None:
    await refused_edit(http, name, code="unsupported_parameter", **{name: "1"})
    reply = await http.post(EDITS, files=parts({"image": IMAGE, name: IMAGE}, {"prompt": PROMPT}))
    check_error(reply, 400, code="unsupported_parameter", param=name)
    if "[" not in name:
        reply = await post_json(http, **{name: {"model": "x"}})
        check_error(reply, 400, code="unsupported_parameter", param=name)


@pytest.mark.parametrize("name", ["allow[]", "loras[][name]", "allow[0]"])
async def test_a_list_in_a_form_is_one_text_of_json(http: httpx.AsyncClient, name: str) -> None:
    field = name.partition("[")[0]
    assert f"{field!r} as one text of JSON" in await refused_edit(http, name, **{name: "steps"})


async def test_a_field_that_there_is_not_is_refused_with_the_nearest(
    http: httpx.AsyncClient,
) -> None:
    code = "unknown_parameter"
    assert "'strength'" in await refused_edit(http, "strenght", code=code, strenght=0.5)
    assert "'feather_px'" in await refused_edit(http, "feather", code=code, feather=4)


@pytest.mark.parametrize(
    ("mask", "fields", "param", "says"),
    [
        (None, {"feather_px": 4}, "feather_px", "without a mask"),
        (None, {"paste_back": False}, "paste_back", "without a mask"),
        (None, {"crop": "auto"}, "crop", "without a mask"),
        (MASK, {"crop": "auto", "paste_back": False}, "paste_back", "together with 'crop'"),
        (MASK, {"feather_px": 4, "paste_back": False}, "feather_px", "while paste_back is false"),
        (
            MASK,
            {"strength": 0.5, "input_fidelity": "low"},
            "input_fidelity",
            "say the same",
        ),
        (MASK, {"fidelity": "fast"}, "fidelity", "from text alone"),
        (MASK, {"allow": ["fidelity"]}, "allow", "from text alone"),
        (MASK, {"min_inference_steps": 11}, "min_inference_steps", "at most the steps"),
        (MASK, {"n": 2, "stream": True}, "n", "must be 1"),
        (MASK, {"stream": True, "response_format": "url"}, "response_format", "leave"),
    ],
    ids=without_bytes,
)
async def test_what_would_change_nothing_or_does_not_fit_together_is_refused(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    mask: bytes | None,
    fields: dict[str, Any],
    param: str,
    says: str,
) -> None:
    assert says in await refused_edit(http, param, IMAGE, mask, **fields)
    assert fake.offered == []


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"strength": 0.05, "num_inference_steps": 10},
            "num_inference_steps to at least 20, or the strength to at least 0.1.",
        ),
        ({"strength": 0.001, "num_inference_steps": 7}, "Raise the strength to at least 0.143."),
        ({"strength": 1e-300}, "none of the 10 steps of the schedule. Raise the strength"),
        ({"strength": 5e-324, "sampler": "lcm", "n": 3}, "Raise the strength"),
    ],
)
async def test_a_strength_that_leaves_no_step_is_refused_with_what_would_do(
    http: httpx.AsyncClient, fields: dict[str, Any], says: str
) -> None:
    assert says in await refused_edit(http, "strength", **fields)


async def test_a_strength_that_a_refusal_names_leaves_a_step(http: httpx.AsyncClient) -> None:
    for num_steps in (1, 3, 7, 49, 93, 100):
        fields: dict[str, Any] = {"num_inference_steps": num_steps}
        message = await refused_edit(http, "strength", strength=1e-9, **fields)
        named = float(message.rpartition("at least ")[2].removesuffix("."))
        assert computed_steps(num_steps, named, is_flow=False) == 1


# a hundred bytes that stand for gigabytes
SMALL_BOMB = png_of(plain_png(60_000, 60_000))


@pytest.mark.parametrize(
    ("image", "mask", "param", "code", "says"),
    [
        (b"GIF89a" + bytes(99), None, "image", "invalid_image", "PNG, JPEG, WebP"),
        (b"", None, "image", "invalid_image", "is empty"),
        (IMAGE[:100], None, "image", "invalid_image", "cannot be decoded"),
        (picture(64, 64, "JPEG")[:-200], None, "image", "invalid_image", "cannot be decoded"),
        (animation("WEBP"), None, "image", "invalid_image", "animation"),
        (animation("PNG"), None, "image", "invalid_image", "animation"),
        (SMALL_BOMB, None, "image", "invalid_image", "pixels"),
        (IMAGE, IMAGE[:100], "mask", "invalid_image", "cannot be decoded"),
        (IMAGE, SMALL_BOMB, "mask", "invalid_image", "pixels"),
        (IMAGE, OPAQUE, "mask", "invalid_image", "alpha"),
        (IMAGE, picture(64, 64, "JPEG"), "mask", "invalid_image", "alpha"),
        (IMAGE, mask_of((0, 0, 0, 0)), "mask", "invalid_image", "nothing"),
        (IMAGE, mask_of((0, 0, 8, 8), 64, 72), "mask", "invalid_value", "64x72"),
    ],
    ids=without_bytes,
)
async def test_a_wrong_image_is_refused_by_its_field(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    image: bytes,
    mask: bytes | None,
    param: str,
    code: str,
    says: str,
) -> None:
    assert says in await refused_edit(http, param, image, mask, code=code)
    reply = await post_json(http, image, mask)
    check_error(reply, 400, param=param)
    assert fake.offered == []


async def test_sizes_are_compared_as_both_are_turned(http: httpx.AsyncClient) -> None:
    image = file_of(gradient(96, 48), "JPEG", exif=exif_of(6))
    as_stored = mask_of((0, 0, 8, 8), 96, 48)
    assert "48x96" in await refused_edit(http, "mask", image, as_stored)


async def test_the_setting_bounds_the_pixels_of_both(
    config: ClusterConfig,
) -> None:
    limits = config.limits.model_copy(update={"max_input_pixels": 64 * 64})
    settings = settings_for(config.model_copy(update={"limits": limits}))
    app = create_app(
        FakeDispatcherClient(shapes_profile()),
        settings,
        results=memory_results(),
        images=sent_images(),
    )
    async with http_of(app) as http:
        assert (await post_form(http, IMAGE, MASK)).status_code == 200
        assert "65x64" in await refused_edit(http, "image", picture(65, 64))
        large = mask_of((0, 0, 8, 8), 64, 65)
        assert "64x65" in await refused_edit(http, "mask", IMAGE, large)


TWO = [coded(IMAGE), coded(MASK)]


@pytest.mark.parametrize(
    ("body", "param", "code", "says"),
    [
        ({}, "image", "missing_required_parameter", "/v1/images/generations"),
        ({"image": None}, "image", "missing_required_parameter", "required"),
        ({"image": []}, "image", "missing_required_parameter", "required"),
        ({"image": TWO}, "image", "invalid_value", "2 images"),
        ({"images": [{"image_url": one} for one in TWO]}, "images", "invalid_value", "2 images"),
        ({"image": TWO[0], "images": TWO[:1]}, "images", "invalid_value", "say the same"),
        ({"image": 5}, "image", "invalid_type", "given 5"),
        ({"image": {"file_id": "file-1"}}, "image", "file_not_found", "does not exist"),
        ({"image": {"url": "x"}}, "image", "invalid_value", "'image_url' or 'file_id' alone"),
        ({"images": [{"image_url": "https://a.org/b.png"}]}, "images", "invalid_value", "a URL"),
        ({"image": "http://a.org/b.png"}, "image", "invalid_value", "a URL"),
        ({"image": "no base64"}, "image", "invalid_value", "base64"),
        ({"image": "\ud800" * 4}, "image", "invalid_value", "base64"),
        ({"image": coded(b"no image at all")}, "image", "invalid_image", "PNG, JPEG, WebP"),
        ({"image": TWO[0], "mask": [TWO[1]]}, "mask", "invalid_type", "an array"),
        ({"image": TWO[0], "mask": {"file_id": "x"}}, "mask", "invalid_value", "no id of a file"),
        ({"image": TWO[0], "mask": "https://a.org"}, "mask", "invalid_value", "a URL"),
    ],
    ids=without_bytes,
)
async def test_a_wrong_image_in_json_is_refused_by_its_field(
    http: httpx.AsyncClient, body: dict[str, Any], param: str, code: str, says: str
) -> None:
    # lone surrogates too, as JSON can write them
    content = json.dumps({"prompt": PROMPT, **body})
    reply = await http.post(EDITS, content=content, headers={"content-type": "application/json"})
    check_error(reply, 400, code=code, param=param)
    assert says in error_of(reply)["message"]


async def test_an_edit_has_one_image(http: httpx.AsyncClient) -> None:
    two = [*parts({"image[]": IMAGE}, {}), *parts({"image[]": MASK}, {"prompt": PROMPT})]
    reply = await http.post(EDITS, files=two)
    check_error(reply, 400, param="image")
    assert "shapes takes 1" in error_of(reply)["message"]
    for url in (EDITS, VARIATIONS, JOBS):
        reply = await http.post(url, files=parts({}, {"prompt": PROMPT}))
        check_error(reply, 400, code="missing_required_parameter", param="image")
    reply = await http.post(EDITS, files=parts({"image": IMAGE}, {}))
    check_error(reply, 400, code="missing_required_parameter", param="prompt")


async def test_what_only_edits_have_is_refused_for_images_from_text(
    http: httpx.AsyncClient,
) -> None:
    fields = {
        "image": coded(IMAGE),
        "mask": coded(MASK),
        "strength": 0.5,
        "input_fidelity": "high",
        "feather_px": 4,
        "paste_back": True,
        "crop": "auto",
    }
    for name, value in fields.items():
        reply = await http.post("/v1/images/generations", json={"prompt": PROMPT, name: value})
        check_error(reply, 400, code="unsupported_parameter", param=name)
        assert EDITS in error_of(reply)["message"]


async def test_another_content_type_is_a_415(http: httpx.AsyncClient) -> None:
    for url in (EDITS, VARIATIONS, JOBS):
        for kind in ("application/x-www-form-urlencoded", "image/png", "multipart/mixed"):
            reply = await http.post(url, content=b"prompt=a", headers={"content-type": kind})
            check_error(reply, 415, code="unsupported_media_type")


async def test_a_field_is_refused_before_any_image_is_decoded(
    fake: FakeDispatcherClient, config: ClusterConfig
) -> None:
    class NoChecks(PlainChecks):
        def image_facts(self, *_: Any) -> Any:
            raise AssertionError("decoded")

    inputs = InputStore.open("memory://undecoded", grace_s=3600.0)
    app = create_app(
        fake, settings_for(config), results=memory_results(), images=SentImages(inputs, NoChecks())
    )
    async with http_of(app) as http:
        for name, value in (("strength", 2), ("partial_images", 1), ("seed", "x")):
            await refused_edit(http, name, **{name: value})
        reply = await http.post(
            JOBS, files=parts({"image": IMAGE}, {"prompt": "a", "stream": True})
        )
        check_error(reply, 400, param="stream")


async def test_checks_that_do_not_work_are_a_503(
    fake: FakeDispatcherClient, config: ClusterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    class BrokenChecks(PlainChecks):
        def image_facts(self, *_: Any) -> Any:
            raise RequestFailed("no process", "coding")

    blobs = BlobStore("memory://broken")
    inputs = InputStore(blobs, grace_s=3600.0, wall_clock=lambda: 0.0)
    images = SentImages(inputs, BrokenChecks())
    app = app_of(fake, config, images=images)
    async with http_of(app) as http:
        check_error(await post_form(http), 503, code="checks_unavailable")
        # what was stored is gone when it is to be checked
        images._checks = PlainChecks()
        monkeypatch.setattr(inputs, "get", lambda *_: None)
        check_error(await post_form(http), 503, code="input_store_unavailable")


@pytest.mark.parametrize(("kind", "longest"), [("webp", 16383), ("jpeg", 65500)])
async def test_a_format_that_cannot_hold_the_image_is_refused(
    http: httpx.AsyncClient, kind: str, longest: int
) -> None:
    """A cropped edit has the size of its template, which may be any."""
    fields = {"crop": "auto", "output_format": kind}
    box = (0, 0, 16, 2)
    image, mask = picture(longest + 1, 2), mask_of(box, longest + 1, 2)
    message = await refused_edit(http, "output_format", image, mask, **fields)
    assert f"at most {longest} px; the image that is returned has {longest + 1}x2" in message
    image, mask = picture(longest, 2), mask_of(box, longest, 2)
    assert (await post_form(http, image, mask, **fields)).status_code != 400
