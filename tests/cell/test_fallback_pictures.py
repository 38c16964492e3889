"""Models that look at pictures, called as they are, in a running service."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import httpx
import numpy as np
import openai
import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as editor
from PIL import Image

from ray_cluster.engine.pipelines import loading
from ray_cluster.engine.stages.autoencoder import Pixels
from tests.cell.local_service import LocalService, running_locally
from tests.cell.test_fallback import PROMPT, alone, coded, ended, file_of, send
from tests.e2e.edit_templates import pixels_of
from tests.e2e.service import API_KEY, HEADERS, images
from tests.engine.random_pipelines import SAVE_EDITORS, SAVE_MORE

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("local"), pytest.mark.timeout(600)]

SAVE = SAVE_MORE | {"qwen-edit-plus": SAVE_EDITORS["qwen-edit-plus"]}
GUIDED: dict[str, dict[str, Any]] = {
    "aura": {"guidance_scale": 3.0},
    "klein": {"guidance_scale": 3.0},
    "qwen-edit-plus": {"true_cfg_scale": 3.0, "negative_prompt": " "},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    return {name: save(root / name) for name, save in SAVE.items()}


@pytest.fixture(scope="module", autouse=True)
def _small_pictures() -> Iterator[None]:
    """The editor looks at pictures of 64x64 pixels instead of 1024x1024, ours and diffusers'."""
    whole = editor.calculate_dimensions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "SEEN_PX", loading.SEEN_PX // 256)
        patch.setattr(editor, "calculate_dimensions", lambda area, ratio: whole(area // 256, ratio))
        yield


@pytest.fixture(scope="module")
def called(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalService]:
    defaults = {"size": "64x64", "num_inference_steps": 4}
    pools = [
        {
            "name": name,
            "model": str(folder),
            "max_px": 64,
            "max_references": {"klein": 16}.get(name),
            "max_num_inference_steps": 20_000,
            "defaults": defaults,
        }
        for name, folder in folders.items()
    ]
    more: dict[str, Any] = {"pools": pools, "cascades": [], "discriminators": []}
    with running_locally(tmp_path_factory.mktemp("called"), **more) as service:
        yield service


def picture(seed: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    return Image.fromarray(levels).resize((64, 64))


def expected(folder: Path, name: str, pictures: list[Image.Image], **own: Any) -> Pixels:
    parts = {}
    if name == "qwen-edit-plus":
        parts = loading._processors(folder, {"processor": ["transformers", "Qwen2VLProcessor"]})
    call = GUIDED[name] | ({"image": pictures} if pictures else {})
    return alone(folder, parts=parts, **call | own)


def body_of(name: str, count: int) -> dict[str, Any]:
    texts = [coded(file_of(picture(seed))) for seed in range(count)]
    return {"prompt": PROMPT, "model": name, "seed": 5, "guidance_scale": 3.0, "images": texts}


def edit(service: LocalService, body: dict[str, Any], **more: Any) -> httpx.Response:
    url = f"{service.url}/v1/images/edits"
    return httpx.post(url, json=body | more, headers=HEADERS, timeout=120)


@pytest.mark.parametrize("name", SAVE_MORE)
def test_images_from_text_are_those_of_diffusers(
    name: str, called: LocalService, folders: dict[str, Path]
) -> None:
    reply = send(called, name, n=2)
    assert reply.status_code == 200, reply.text
    for index, one in enumerate(images(reply)):
        wanted = expected(folders[name], name, [], seed=5 + index)
        assert np.array_equal(pixels_of(one), wanted)


@pytest.mark.parametrize(("name", "count"), [("klein", 1), ("klein", 3), ("qwen-edit-plus", 2)])
def test_edits_are_those_of_diffusers(
    name: str, count: int, called: LocalService, folders: dict[str, Path]
) -> None:
    pictures = [picture(seed) for seed in range(count)]
    wanted = expected(folders[name], name, pictures)
    reply = edit(called, body_of(name, count))
    assert reply.status_code == 200, reply.text
    [image] = images(reply)
    assert np.array_equal(pixels_of(image), wanted)
    # the order tells
    if count > 1:
        body = body_of(name, count)
        other = images(edit(called, body | {"images": body["images"][::-1]}))[0]
        assert not np.array_equal(pixels_of(other), wanted)


def test_a_job_and_a_stream_make_the_same(called: LocalService, folders: dict[str, Path]) -> None:
    name = "qwen-edit-plus"
    wanted = expected(folders[name], name, [picture(0), picture(1)])
    body = body_of(name, 2)
    job = httpx.post(f"{called.url}/v1/jobs", json=body, headers=HEADERS).json()
    events = httpx.get(f"{called.url}/v1/jobs/{job['id']}/events", headers=HEADERS, timeout=120)
    assert "event: completed" in events.text, events.text[-300:]
    content = httpx.get(ended(called, job["id"])["data"][0]["url"], headers=HEADERS).content
    assert np.array_equal(pixels_of(content), wanted)
    reply = edit(called, body, stream=True)
    lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["type"] == "image_edit.completed"
    assert np.array_equal(pixels_of(base64.b64decode(last["b64_json"])), wanted)


def test_a_cancelled_edit_frees_the_pool(called: LocalService) -> None:
    body = body_of("klein", 2) | {"num_inference_steps": 1000}
    job = httpx.post(f"{called.url}/v1/jobs", json=body, headers=HEADERS).json()
    url = f"{called.url}/v1/jobs/{job['id']}"
    for _ in range(600):
        if httpx.get(url, headers=HEADERS).json()["step"] > 2:
            break
        time.sleep(0.05)
    assert httpx.delete(url, headers=HEADERS).is_success
    began_s = time.monotonic()
    assert edit(called, body_of("klein", 1)).status_code == 200
    assert time.monotonic() - began_s < 20
    assert ended(called, job["id"])["state"] == "cancelled"


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_the_official_client_edits_several(
    count: int, called: LocalService, folders: dict[str, Path]
) -> None:
    client = openai.OpenAI(base_url=f"{called.url}/v1", api_key=API_KEY, max_retries=0, timeout=120)
    pictures = [picture(seed) for seed in range(count)]
    reply = client.images.edit(
        image=[file_of(one) for one in pictures],
        prompt=PROMPT,
        model="klein",
        extra_body={"seed": 5, "guidance_scale": 3},
    )
    assert reply.data is not None
    made = pixels_of(base64.b64decode(reply.data[0].b64_json or ""))
    assert np.array_equal(made, expected(folders["klein"], "klein", pictures))


def test_what_is_refused(called: LocalService) -> None:
    reply = send(called, "qwen-edit-plus")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model"), reply.text
    reply = send(called, "klein", negative_prompt="grey")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "negative_prompt")
    message = edit(called, body_of("qwen-edit-plus", 4)).json()["error"]["message"]
    assert "qwen-edit-plus takes 3. So many are taken by: klein." in message
    cards = httpx.get(f"{called.url}/v1/models", headers=HEADERS).json()["data"]
    assert {one["id"]: (one["max_input_images"], one["needs_image"]) for one in cards} == {
        "aura": (0, False),
        "klein": (16, False),
        "qwen-edit-plus": (3, True),
    }


@pytest.mark.parametrize("name", ["klein", "qwen-edit-plus"])
def test_a_mask_is_for_where_a_sibling_takes_it(
    name: str, called: LocalService, folders: dict[str, Path]
) -> None:
    """What it spares stays, bit for bit."""
    template, mask = Image.effect_noise((64, 64), 90).convert("RGB"), Image.new("L", (64, 64))
    mask.paste(255, (8, 16, 40, 48))
    alpha = Image.merge("LA", [mask.point(lambda one: 255 - one)] * 2)
    body = body_of(name, 0) | {"images": [coded(file_of(template)), coded(file_of(picture(3)))]}
    reply = edit(called, body, mask=coded(file_of(alpha)), strength=0.75)
    if name == "qwen-edit-plus":
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "mask")
        return
    assert reply.status_code == 200, reply.text
    whole = diffusers.DiffusionPipeline.from_pretrained(folders[name])
    own = diffusers.Flux2KleinInpaintPipeline(**whole.components)
    image = own(
        prompt=PROMPT,
        image=template,
        mask_image=mask,
        image_reference=picture(3),
        strength=0.75,
        num_inference_steps=4,
        guidance_scale=3.0,
        generator=torch.Generator("cpu").manual_seed(5),
    ).images[0]
    expected = np.where(np.asarray(mask)[..., None] > 0, image, template)
    made = pixels_of(images(reply)[0])
    assert np.array_equal(made, expected)
    assert not np.array_equal(made, np.asarray(template))
    one = edit(called, body_of(name, 3), mask=coded(file_of(alpha)))
    assert (one.status_code, one.json()["error"]["param"]) == (400, "image"), one.text
