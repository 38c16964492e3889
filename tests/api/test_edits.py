"""What a call that edits an image becomes: the request, its size, its steps, and the reply."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from typing import Any

import httpx
import pytest
from PIL import Image

from ray_cluster.policies.edits import Box
from ray_cluster.policies.fidelity import Terms
from ray_cluster.requests import BlobRef, Edit
from tests.api.checks import URL, check_error
from tests.api.conftest import shapes_profile
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
    in_base64,
    mask,
    mask_of_all,
    part,
    photo,
)
from tests.fakes import FakeDispatcherClient, model_profile
from tests.imaging.pictures import exif_of, file_of


def ref_of(data: bytes) -> BlobRef:
    return BlobRef(hashlib.sha256(data).hexdigest(), len(data))


@both_ways
async def test_an_edit_has_all_that_the_call_says(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, post: Post
) -> None:
    more: dict[str, Any] = {
        "negative_prompt": "blue",
        "seed": 7,
        "num_inference_steps": 20,
        "guidance_scale": 2.5,
        "sampler": "euler",
        "strength": 0.6,
        "feather_px": 3,
        "paste_back": True,
        "output_format": "webp",
        "output_compression": 80,
        "priority": 5,
        "slo_s": 9,
    }
    request = await edited(http, fake, post, mask=mask(), **more)
    assert request.edit == Edit(
        image=ref_of(photo()),
        canvas_px=(64, 48),
        schedule_steps=20,
        mask=ref_of(mask()),
        mask_ratio=0.0625,
        strength=0.6,
        paste_back=True,
        feather_px=3,
    )
    assert (request.num_steps, request.schedule_steps, request.first_step) == (12, 20, 8)
    assert (request.size_px, request.output_px) == ((64, 48), (64, 48))
    assert (request.prompt, request.negative_prompt, request.seed) == (PROMPT, "blue", 7)
    assert (request.guidance_scale, request.sampler, request.priority) == (2.5, "euler", 5)
    assert (request.output.image_format, request.output.compression) == ("webp", 80)
    assert request.slo_s == 9


async def test_a_form_and_json_become_the_same_request(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    same = {"seed": 1, "mask": mask(), "strength": 1, "min_inference_steps": 5, "allow": ["steps"]}
    one, other = [
        replace(await edited(http, fake, post, **same), request_id="")
        for post in (by_form, by_json)
    ]
    assert one == other


@both_ways
async def test_without_a_mask_all_of_the_image_is_edited(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, post: Post
) -> None:
    request = await edited(http, fake, post)
    assert request.edit == Edit(ref_of(photo()), (64, 48), 10, strength=0.8)
    assert request.num_steps == 8


@pytest.mark.parametrize("name", ["image", "image[]"])
async def test_a_form_names_its_image_alone_or_as_a_list(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, name: str
) -> None:
    parts: Any = [(name, part(photo())), ("prompt", part(PROMPT)), ("mask[]", part(mask()))]
    assert (await http.post(EDITS, files=parts)).status_code == 200
    [request] = fake.offered[-1]
    assert request.inputs == (ref_of(photo()), ref_of(mask()))


TEXT = in_base64(photo())
DATA_URL = "data:image/jpeg;base64," + TEXT


@pytest.mark.parametrize("url", [EDITS, VARIATIONS])
@pytest.mark.parametrize(
    "images",
    [
        {"image": TEXT},
        {"image": DATA_URL},
        {"image": [TEXT]},
        {"image": {"image_url": DATA_URL}},
        {"images": [TEXT]},
        {"images": [{"image_url": DATA_URL}]},
        {"images": [{"image_url": TEXT}], "image": None, "mask": None},
    ],
)
async def test_json_has_its_image_in_every_spelling(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, url: str, images: dict[str, Any]
) -> None:
    response = await http.post(url, json={"prompt": PROMPT, **images})
    assert response.status_code == 200, response.text
    [request] = fake.offered[-1]
    assert request.inputs == (ref_of(photo()),)


@pytest.mark.parametrize("given", [{"image_url": in_base64(mask())}, in_base64(mask())])
async def test_json_has_its_mask_in_both_spellings(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, given: object
) -> None:
    request = await edited(http, fake, by_json, mask=given)
    assert request.inputs == (ref_of(photo()), ref_of(mask()))


# strength and steps


@pytest.mark.parametrize(
    ("url", "has_mask", "fields", "strength"),
    [
        (EDITS, True, {}, 1.0),
        (EDITS, True, {"input_fidelity": "low"}, 1.0),
        (EDITS, True, {"input_fidelity": "high"}, 0.8),
        (EDITS, True, {"strength": 0.3}, 0.3),
        (EDITS, False, {}, 0.8),
        (EDITS, False, {"input_fidelity": "low"}, 0.8),
        (EDITS, False, {"input_fidelity": "high"}, 0.4),
        (EDITS, False, {"strength": 1}, 1.0),
        (VARIATIONS, False, {}, 0.6),
        (VARIATIONS, False, {"input_fidelity": "low"}, 0.6),
        (VARIATIONS, False, {"input_fidelity": "high"}, 0.4),
        (VARIATIONS, False, {"strength": 0.7}, 0.7),
    ],
)
async def test_a_strength_by_mask_and_fidelity(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    url: str,
    has_mask: bool,
    fields: dict[str, Any],
    strength: float,
) -> None:
    images = {"mask": mask()} if has_mask else {}
    request = await edited(http, fake, by_form, url, **images, **fields)
    assert request.edit is not None
    assert request.edit.strength == strength
    assert request.num_steps == int(10 * strength + 1e-9)


@pytest.mark.parametrize(
    ("sampler", "steps", "strength", "num_steps"),
    [
        ("ddim", 10, 0.25, 2),
        ("ddim", 10, 0.1, 1),
        # flows round up, as diffusers does
        ("flow_match_euler", 10, 0.25, 3),
        ("flow_match_euler", 10, 0.01, 1),
        ("flow_match_euler", 1, 0.01, 1),
    ],
)
async def test_a_strength_leaves_the_last_steps(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    sampler: Any,
    steps: int,
    strength: float,
    num_steps: int,
) -> None:
    fake.profiles = {"shapes": replace(shapes_profile(), max_steps_by_sampler={sampler: 100})}
    fields = {"sampler": sampler, "num_inference_steps": steps, "strength": strength}
    request = await edited(http, fake, **fields)
    assert (request.num_steps, request.schedule_steps) == (num_steps, steps)


async def test_the_least_steps_are_those_of_the_schedule(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fields = {"num_inference_steps": 20, "min_inference_steps": 10, "strength": 0.5}
    request = await edited(http, fake, **fields)
    assert request.terms == Terms("exact", 10, 5)
    assert (request.num_steps, request.fewest_steps) == (10, 5)
    # a schedule of one step would leave none
    request = await edited(http, fake, **{**fields, "min_inference_steps": 1})
    assert request.fewest_steps == 1


# sizes


@pytest.mark.parametrize(
    ("size", "fields", "canvas", "work"),
    [
        ((64, 48), {}, (64, 48), (64, 48)),
        ((64, 48), {"size": "auto"}, (64, 48), (64, 48)),
        # off the grid: filled up, and cut off again
        ((50, 40), {}, (50, 40), (56, 40)),
        ((50, 40), {"size": "50x40"}, (50, 40), (56, 40)),
        # too small, too large, too long
        ((20, 20), {}, (32, 32), (32, 32)),
        ((512, 300), {}, (256, 150), (256, 152)),
        ((512, 20), {}, (256, 32), (256, 32)),
        ((64, 48), {"size": "96x32"}, (96, 32), (96, 32)),
    ],
)
@pytest.mark.parametrize("has_mask", [False, True])
async def test_the_size_is_the_images_within_the_models_bounds(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    has_mask: bool,
    size: tuple[int, int],
    fields: dict[str, Any],
    canvas: tuple[int, int],
    work: tuple[int, int],
) -> None:
    masks = {"mask": mask(*size)} if has_mask else {}
    response = await by_form(http, image=photo(*size), prompt=PROMPT, **masks, **fields)
    assert response.status_code == 200, response.text
    [request] = fake.offered[-1]
    assert request.edit is not None
    assert (request.output_px, request.size_px, request.edit.window) == (canvas, work, None)
    assert response.json()["size"] == "{}x{}".format(*canvas)


@pytest.mark.parametrize(
    ("size", "box", "fields", "canvas", "window", "work"),
    [
        # the model's native size around a small mask
        ((300, 200), (150, 100, 10, 10), {}, (300, 200), (123, 73, 64, 64), (64, 64)),
        ((300, 200), (0, 190, 10, 10), {}, (300, 200), (0, 136, 64, 64), (64, 64)),
        # a margin around a larger one, and what the model does not make is scaled down
        ((300, 200), (60, 80, 100, 40), {}, (300, 200), (34, 52, 152, 96), (152, 96)),
        ((600, 600), (150, 150, 300, 300), {}, (600, 600), (72, 72, 456, 456), (256, 256)),
        # the mask goes with the image to another size
        (
            *((300, 200), (150, 100, 10, 10), {"size": "256x128"}),
            *((256, 128), (100, 35, 64, 64), (64, 64)),
        ),
        # nothing to cut off
        ((64, 48), (8, 8, 16, 12), {}, (64, 48), None, (64, 48)),
    ],
)
async def test_a_crop_is_what_is_around_the_mask(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    size: tuple[int, int],
    box: tuple[int, int, int, int],
    fields: dict[str, Any],
    canvas: tuple[int, int],
    window: tuple[int, int, int, int] | None,
    work: tuple[int, int],
) -> None:
    response = await by_form(
        http, image=photo(*size), mask=mask(*size, box), prompt=PROMPT, crop="auto", **fields
    )
    assert response.status_code == 200, response.text
    [request] = fake.offered[-1]
    assert request.edit is not None
    assert request.edit.window == (None if window is None else Box(*window))
    assert (request.output_px, request.size_px) == (canvas, work)
    [made] = response.json()["data"]
    assert made["edit"]["crop"] == (None if window is None else list(window))
    share = box[2] * box[3] / (size[0] * size[1])
    seen = canvas if window is None else window[2:]
    expected = share * canvas[0] * canvas[1] / (seen[0] * seen[1])
    assert made["edit"]["mask_ratio"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("turned", ["image", "mask", "both"])
async def test_images_and_masks_are_compared_as_they_are_seen(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, turned: str
) -> None:
    upright, lying = photo(48, 64), photo(64, 48, exif=exif_of(6))
    image = upright if turned == "mask" else lying
    [plain, with_exif] = [mask(48, 64), _turned_mask()]
    request = await edited(http, fake, image=image, mask=plain if turned == "image" else with_exif)
    assert request.output_px == (48, 64)


def _turned_mask() -> bytes:
    return file_of(Image.open(io.BytesIO(mask(64, 48))), exif=exif_of(6))


# a mask of everything


@both_ways
async def test_a_mask_of_everything_is_an_image_from_text(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, post: Post
) -> None:
    whole = {"prompt": PROMPT, "image": photo(), "mask": mask_of_all(), "seed": 7}
    response = await post(http, EDITS, **whole)
    assert response.status_code == 200, response.text
    [request] = fake.offered[-1]
    await http.post(URL, json={"prompt": PROMPT, "size": "64x48", "seed": 7})
    [plain] = fake.offered[-1]
    assert replace(request, request_id="", owner="") == replace(plain, request_id="", owner="")
    assert "edit" not in response.json()["data"][0]


@pytest.mark.parametrize(
    ("size", "fields"),
    [((64, 48), {"strength": 0.5}), ((50, 40), {}), ((64, 48), {"input_fidelity": "high"})],
)
async def test_where_something_of_the_image_counts_it_stays_an_edit(
    http: httpx.AsyncClient,
    fake: FakeDispatcherClient,
    size: tuple[int, int],
    fields: dict[str, Any],
) -> None:
    request = await edited(http, fake, image=photo(*size), mask=mask_of_all(*size), **fields)
    assert request.edit is not None
    assert request.edit.mask_ratio == 1


# replies


async def test_a_reply_says_how_each_image_was_edited(
    http: httpx.AsyncClient, fake: FakeDispatcherClient
) -> None:
    fields = {"prompt": PROMPT, "image": photo(), "mask": mask(), "strength": 0.5, "n": 2}
    response = await by_form(http, **fields, seed=3, response_format="url")
    reply = response.json()
    assert (reply["model"], reply["size"], reply["quality"]) == ("shapes", "64x48", "auto")
    for index, made in enumerate(reply["data"]):
        assert made["edit"] == {"strength": 0.5, "mask_ratio": 0.0625, "crop": None}
        # as the call says it
        assert (made["seed"], made["num_inference_steps"]) == (3 + index, 10)
        assert made["fidelity"]["steps_computed"] == made["fidelity"]["steps_asked"] == 5
        assert made["url"].startswith("http://gateway/v1/files/img-")
    assert [one.seed for one in fake.offered[-1]] == [3, 4]


# variations


@both_ways
async def test_a_variation_needs_no_prompt_and_is_deprecated(
    http: httpx.AsyncClient, fake: FakeDispatcherClient, post: Post
) -> None:
    response = await post(http, VARIATIONS, image=photo(), n=2, size="64x64")
    assert response.status_code == 200, response.text
    assert response.headers["deprecation"] == "true"
    for request in fake.offered[-1]:
        assert (request.prompt, request.output_px) == ("", (64, 64))
    request = await edited(http, fake, post, VARIATIONS)
    assert request.prompt == PROMPT
    assert "deprecation" not in (await post(http, EDITS, image=photo(), prompt="a")).headers


@both_ways
async def test_a_variation_has_no_mask(http: httpx.AsyncClient, post: Post) -> None:
    response = await post(http, VARIATIONS, image=photo(), mask=mask())
    check_error(response, 400, code="unsupported_parameter", param="mask")
    assert "/v1/images/edits" in response.json()["error"]["message"]


# inpainting models


@pytest.fixture
def masked(fake: FakeDispatcherClient) -> FakeDispatcherClient:
    fake.profiles = {"shapes": replace(model_profile("shapes"), edits="masked")}
    return fake


@both_ways
async def test_an_inpainting_model_makes_edits_with_a_mask(
    http: httpx.AsyncClient, masked: FakeDispatcherClient, post: Post
) -> None:
    for one in (mask(), mask_of_all()):
        request = await edited(http, masked, post, mask=one)
        assert request.edit is not None
        assert request.edit.mask == ref_of(one)


@pytest.mark.parametrize("url", [EDITS, VARIATIONS, JOBS])
@both_ways
async def test_an_inpainting_model_makes_no_edit_without_a_mask(
    http: httpx.AsyncClient, masked: FakeDispatcherClient, post: Post, url: str
) -> None:
    response = await post(http, url, image=photo(), prompt=PROMPT)
    check_error(response, 400, param="mask", code="missing_required_parameter")
    assert "inpainting" in response.json()["error"]["message"]


@pytest.mark.parametrize("url", [URL, JOBS])
async def test_an_inpainting_model_makes_nothing_from_text(
    http: httpx.AsyncClient, masked: FakeDispatcherClient, url: str
) -> None:
    response = await http.post(url, json={"prompt": PROMPT})
    check_error(response, 400, param="model")
    assert "/v1/images/edits" in response.json()["error"]["message"]


async def test_the_list_of_models_says_what_each_edits(
    http: httpx.AsyncClient, masked: FakeDispatcherClient
) -> None:
    masked.profiles["late"] = model_profile("late")
    cards = (await http.get("/v1/models")).json()["data"]
    edits = {card["id"]: (card["edits"], card["max_input_images"]) for card in cards}
    assert edits == {"shapes": ("masked", 1), "late": ("any", 1)}
