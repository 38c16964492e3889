"""Edits that are accepted: what the engine is asked for, and what the reply says of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from ray_cluster.api.app import create_app
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.policies.edits import Box
from ray_cluster.policies.fidelity import FewerSteps, StepTable
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.requests import Edit, ImageRequest, SamplerName
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import OPEN_OWNER, InputStore
from tests.api.checks import check_error, error_of
from tests.api.conftest import app_of, http_of, shapes_profile
from tests.api.edit_calls import (
    EDITS,
    IMAGE,
    JOBS,
    MASK,
    PROMPT,
    VARIATIONS,
    WHOLE_MASK,
    coded,
    edited,
    mask_of,
    parts,
    picture,
    post_form,
    post_json,
    ref_of,
)
from tests.fakes import FakeDispatcherClient, completed, sent_images, settings_for
from tests.imaging.pictures import exif_of, file_of, gradient
from tests.jobs.jobs_cell import JobsCell, Replica, until


async def test_a_form_and_json_ask_for_the_same(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fields = {
        "n": 2,
        "seed": 7,
        "num_inference_steps": 20,
        "strength": 0.5,
        "feather_px": 4,
        "paste_back": True,
        "guidance_scale": 2.5,
        "metadata": False,
        "allow": ["steps"],
        "min_inference_steps": 12,
        "user": "12",
        "slo_s": 30,
    }
    assert (await post_form(http, IMAGE, MASK, **fields)).status_code == 200
    assert (await post_json(http, IMAGE, MASK, **fields)).status_code == 200
    by_form, by_json = fake.offered
    assert [one.seed for one in by_form] == [7, 8]
    anonymous = [[replace(one, request_id="") for one in offer] for offer in fake.offered]
    assert anonymous[0] == anonymous[1]
    request = by_json[0]
    assert request.edit == Edit(
        image=ref_of(IMAGE),
        canvas_px=(64, 64),
        schedule_steps=20,
        mask=ref_of(MASK),
        mask_ratio=0.25,
        strength=0.5,
        feather_px=4,
    )
    assert (request.num_steps, request.schedule_steps, request.fewest_steps) == (10, 20, 6)
    assert (request.size_px, request.owner) == ((64, 64), OPEN_OWNER)
    assert request.inputs == (ref_of(IMAGE), ref_of(MASK))


async def test_the_images_are_in_the_input_store_under_their_owner(
    fake: FakeDispatcherClient, config: ClusterConfig, tmp_path: Path
) -> None:
    images = sent_images(str(tmp_path))
    app = create_app(
        fake, settings_for(config), results=BlobStore("memory://results"), images=images
    )
    async with http_of(app) as http:
        request = await edited(http, fake, IMAGE, MASK)
    inputs = InputStore.open(str(tmp_path), grace_s=3600.0)
    assert [inputs.get(request.owner, ref) for ref in request.inputs] == [IMAGE, MASK]


@pytest.mark.parametrize(
    "body",
    [
        {"image": coded(IMAGE)},
        {"image": f"data:image/jpeg;base64,{coded(IMAGE)}"},
        {"image": [coded(IMAGE)]},
        {"images": [{"image_url": f"data:image/png;base64,{coded(IMAGE)}"}]},
        {"image": {"image_url": coded(IMAGE)}},
    ],
    ids=["base64", "data url", "a list of one", "openai's", "an object"],
)
async def test_each_spelling_of_an_image_in_json_is_read(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, body: dict[str, Any]
) -> None:
    mask = {"image_url": f"data:image/png;base64,{coded(MASK)}"}
    reply = await http.post(EDITS, json={"prompt": PROMPT, **body, "mask": mask})
    assert reply.status_code == 200, reply.text
    assert fake.offered[0][0].inputs == (ref_of(IMAGE), ref_of(MASK))


async def test_a_form_may_give_one_image_as_a_list_and_python_words_for_booleans(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    sent = parts({"image[]": IMAGE, "mask": MASK}, {"prompt": "17", "paste_back": "False"})
    assert (await http.post(EDITS, files=sent)).status_code == 200
    [request] = fake.offered[0]
    assert request.edit is not None
    # a text that could be a number stays a text
    assert (request.prompt, request.edit.paste_back) == ("17", False)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
async def test_an_image_of_any_kind_is_turned_as_its_exif_data_says(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, kind: str
) -> None:
    image = file_of(gradient(96, 48), kind, exif=exif_of(6))
    request = await edited(http, fake, image, mask_of((0, 0, 8, 8), 48, 96))
    assert (request.output_px, request.size_px) == ((48, 96), (48, 96))


@pytest.mark.parametrize(("alpha", "status"), [(127, 200), (128, 400)])
async def test_a_mask_edits_where_its_alpha_is_below_128_whatever_its_colours(
    http: httpx.AsyncClient, alpha: int, status: int
) -> None:
    pixels = np.dstack([gradient(64, 64), np.full((64, 64), alpha, np.uint8)])
    assert (await post_form(http, IMAGE, file_of(pixels))).status_code == status


@pytest.mark.parametrize(
    ("fields", "mask", "strength"),
    [
        ({}, MASK, 1.0),
        ({}, None, 0.8),
        ({"input_fidelity": "low"}, MASK, 1.0),
        ({"input_fidelity": "low"}, None, 0.8),
        ({"input_fidelity": "high"}, MASK, 0.8),
        ({"input_fidelity": "high"}, None, 0.4),
        ({"strength": 1}, None, 1.0),
        ({"strength": 0.3}, MASK, 0.3),
    ],
)
async def test_strength_follows_from_what_is_given(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    fields: dict[str, Any],
    mask: bytes | None,
    strength: float,
) -> None:
    request = await edited(http, fake, IMAGE, mask, num_inference_steps=20, **fields)
    assert request.edit is not None
    assert request.edit.strength == strength
    assert (request.num_steps, request.first_step) == (20 * strength, 20 - 20 * strength)


@pytest.mark.parametrize(("sampler", "num_steps"), [("ddim", 1), ("flow_match_euler", 2)])
async def test_steps_are_rounded_as_the_samplers_kind_has_it(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, sampler: SamplerName, num_steps: int
) -> None:
    bounds: dict[SamplerName, int] = {sampler: 50}
    profile = replace(shapes_profile(), default_sampler=sampler, max_steps_by_sampler=bounds)
    fake.profiles = {"shapes": profile}
    request = await edited(http, fake, strength=0.15, num_inference_steps=10)
    assert (request.num_steps, request.schedule_steps) == (num_steps, 10)


@pytest.mark.parametrize(
    ("image_px", "fields", "canvas", "work"),
    [
        ((64, 64), {}, (64, 64), (64, 64)),
        # filled up to the model's grid
        ((67, 50), {}, (67, 50), (72, 56)),
        # within the bounds of the model
        ((512, 256), {}, (256, 128), (256, 128)),
        ((16, 32), {}, (32, 64), (32, 64)),
        ((67, 50), {"size": "96x64"}, (96, 64), (96, 64)),
        ((67, 50), {"size": "auto"}, (67, 50), (72, 56)),
    ],
)
async def test_the_canvas_is_the_images_size_or_what_the_call_says(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    image_px: tuple[int, int],
    fields: dict[str, Any],
    canvas: tuple[int, int],
    work: tuple[int, int],
) -> None:
    reply = await post_form(http, picture(*image_px), **fields)
    assert reply.status_code == 200, reply.text
    [request] = fake.offered[0]
    assert (request.output_px, request.size_px) == (canvas, work)
    assert reply.json()["size"] == "{}x{}".format(*canvas)


async def test_a_crop_shows_the_model_the_surroundings_of_the_mask(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    mask = mask_of((300, 100, 20, 20), 640, 400)
    reply = await post_form(http, picture(640, 400), mask, crop="auto", seed=1)
    [request] = fake.offered[0]
    assert request.edit is not None
    # larger than the model makes, and untouched
    assert (request.output_px, request.size_px) == ((640, 400), (64, 64))
    window = request.edit.window
    assert window == Box(278, 78, 64, 64)
    assert request.edit.mask_ratio == pytest.approx(400 / 64**2)
    [image] = reply.json()["data"]
    assert image["edit"] == {
        "strength": 1.0,
        "mask_ratio": round(400 / 64**2, 6),
        "crop": [278, 78, 64, 64],
    }


async def test_a_mask_of_everything_at_full_strength_is_text_to_image(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    reply = await post_form(http, IMAGE, WHOLE_MASK, seed=3)
    [request] = fake.offered[0]
    assert (request.edit, request.size_px, request.seed) == (None, (64, 64), 3)
    assert "edit" not in reply.json()["data"][0]
    # not where something of the image is left, or the model makes another size
    assert (await edited(http, fake, IMAGE, WHOLE_MASK, strength=0.9)).edit is not None
    odd = mask_of(None, 67, 50)
    assert (await edited(http, fake, picture(67, 50), odd)).edit is not None


async def test_a_reply_says_what_an_edit_was_made_with(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    def with_fewer(request: ImageRequest) -> Completed:
        return replace(completed(request), num_steps=6)

    table = StepTable("ddim", 9.0, (FewerSteps(20, 8, 3),))
    fake.profiles["shapes"] = replace(fake.profiles["shapes"], fewer_steps=table)
    fields = {"strength": 0.5, "num_inference_steps": 20, "min_inference_steps": 10}
    reply = (await post_form(http, IMAGE, MASK, **fields)).json()
    [image] = reply["data"]
    assert (reply["quality"], reply["size"]) == ("auto", "64x64")
    assert image["num_inference_steps"] == 20
    assert image["fidelity"]["steps_computed"] == image["fidelity"]["steps_asked"] == 10
    assert image["edit"] == {"strength": 0.5, "mask_ratio": 0.25, "crop": None}
    # 6 of 12 steps keep the strength
    fake.outcome = with_fewer
    [image] = (await post_form(http, IMAGE, MASK, **fields)).json()["data"]
    assert (image["num_inference_steps"], image["fidelity"]["steps_computed"]) == (12, 6)
    # what the table says was measured without edits
    assert (image["fidelity"]["asked"], image["fidelity"]["got"]) == ("exact", None)


async def test_a_variation_needs_no_text_and_is_marked_as_deprecated(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    reply = await http.post(VARIATIONS, files=parts({"image": IMAGE}, {"n": 2}))
    assert (reply.status_code, reply.headers["deprecation"]) == (200, "true")
    assert len(fake.offered[0]) == 2
    request = fake.offered[0][0]
    assert request.edit is not None
    assert (request.prompt, request.edit.strength, request.edit.mask) == ("", 0.6, None)
    more = {"strength": 0.3, "prompt": "a star"}
    await http.post(VARIATIONS, files=parts({"image": IMAGE}, more))
    request = fake.offered[1][0]
    assert request.edit is not None
    assert (request.prompt, request.edit.strength) == ("a star", 0.3)
    reply = await http.post(EDITS, files=parts({"image": IMAGE}, {"prompt": "a star"}))
    assert "deprecation" not in reply.headers


async def test_variations_have_no_mask(http: httpx.AsyncClient) -> None:
    reply = await http.post(VARIATIONS, files=parts({"image": IMAGE, "mask": MASK}, {}))
    check_error(reply, 400, code="unsupported_parameter", param="mask")
    reply = await http.post(VARIATIONS, json={"image": coded(IMAGE), "mask": coded(MASK)})
    check_error(reply, 400, code="unsupported_parameter", param="mask")


async def test_an_inpainting_model_makes_masked_edits_alone(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fake.profiles = {"shapes": replace(shapes_profile(), edits="masked")}
    for mask in (MASK, WHOLE_MASK):
        assert (await edited(http, fake, IMAGE, mask)).edit is not None
    reply = await post_form(http, IMAGE)
    check_error(reply, 400, code="missing_required_parameter", param="mask")
    assert "shapes is an inpainting model" in error_of(reply)["message"]
    reply = await http.post("/v1/images/generations", json={"prompt": PROMPT})
    check_error(reply, 400, param="model")
    [card] = (await http.get("/v1/models")).json()["data"]
    assert (card["edits"], card["max_input_images"]) == ("masked", 1)


@pytest.fixture
async def jobs(
    cell: JobsCell, replica: Replica, config: ClusterConfig
) -> AsyncIterator[httpx.AsyncClient]:
    assert replica.model == "shapes"
    app = app_of(cell, config, results=cell.results)
    async with http_of(app) as client:
        yield client


async def test_a_job_edits_and_its_images_say_how(
    jobs: httpx.AsyncClient, cell: JobsCell, replica: Replica
) -> None:
    fields = {"prompt": PROMPT, "strength": 0.5, "num_inference_steps": 20, "crop": "auto"}
    image, mask = picture(200, 120), mask_of((100, 50, 10, 10), 200, 120)
    created = await jobs.post(JOBS, files=parts({"image": image, "mask": mask}, fields))
    assert created.status_code == 202, created.text
    job = created.json()
    assert (job["size"], job["num_steps"]) == ("200x120", 10)
    await replica.poll()
    [lease] = replica.leases.values()
    assert lease.request.inputs == (ref_of(image), ref_of(mask))
    assert lease.request.job_id == job["id"]
    await replica.finish(lease, b"made")
    await until(lambda: cell.jobs_service.num_open == 0)
    done = (await jobs.get(f"{JOBS}/{job['id']}")).json()
    [made] = done["data"]
    assert (done["state"], made["num_inference_steps"]) == ("completed", 20)
    assert made["edit"] == {
        "strength": 0.5,
        "mask_ratio": round(100 / 64**2, 6),
        "crop": [73, 23, 64, 64],
    }


async def test_a_form_and_json_of_one_content_are_the_same_call(jobs: httpx.AsyncClient) -> None:
    fields = {"prompt": PROMPT, "strength": 0.5, "seed": 1}
    files = {"image": IMAGE, "mask": MASK}
    texts = {name: coded(data) for name, data in files.items()}

    async def post(key: str, **call: Any) -> tuple[int, str | None]:
        reply = await jobs.post(JOBS, headers={"Idempotency-Key": key}, **call)
        return reply.status_code, reply.json().get("id")

    status, job_id = await post("a", files=parts(files, fields))
    assert status == 202
    assert await post("a", json=fields | texts) == (200, job_id)
    assert await post("a", json=json.loads(json.dumps(fields | texts)) | {"n": None}) == (
        200,
        job_id,
    )
    spelled = {"images": [{"image_url": texts["image"]}], "mask": {"image_url": texts["mask"]}}
    assert await post("a", json=fields | spelled) == (200, job_id)
    others = (
        parts(files | {"mask": mask_of((0, 0, 9, 9))}, fields),
        parts(files | {"image": picture(64, 64, "WEBP")}, fields),
        parts({"image": IMAGE}, fields),
        parts(files, fields | {"seed": 2}),
    )
    for other in others:
        assert (await post("a", files=other))[0] == 422
    # nor is a variation an edit of the same fields
    assert (await post("b", files=parts({"image": IMAGE}, fields)))[0] == 202
    reply = await jobs.post(
        VARIATIONS, headers={"Idempotency-Key": "b"}, files=parts({"image": IMAGE}, fields)
    )
    check_error(reply, 422, code="idempotency_key_reused")


async def test_a_job_without_an_image_is_from_text(
    jobs: httpx.AsyncClient, replica: Replica
) -> None:
    assert (await jobs.post(JOBS, json={"prompt": PROMPT})).status_code == 202
    await replica.poll()
    [lease] = replica.leases.values()
    assert lease.request.edit is None
    reply = await jobs.post(JOBS, json={"prompt": PROMPT, "mask": coded(MASK)})
    check_error(reply, 400, code="unsupported_parameter", param="mask")


async def test_bodies_of_edits_may_be_as_large_as_uploads(
    http: httpx.AsyncClient, config: ClusterConfig
) -> None:
    image = picture() + bytes(config.limits.max_body_bytes * 2)
    assert (await post_json(http, image)).status_code == 200
    long = "x" * config.limits.max_body_bytes
    reply = await http.post("/v1/images/generations", json={"prompt": long})
    check_error(reply, 413, code="body_too_large")
    reply = await http.post(JOBS, json={"prompt": long})
    check_error(reply, 413, code="body_too_large")
    reply = await post_form(http, prompt=long + "x")
    check_error(reply, 413, code="body_too_large", param="prompt")
