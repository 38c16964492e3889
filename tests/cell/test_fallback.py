"""Pipelines that the step engine does not cover, in a running service: images, jobs, refusals."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import diffusers
import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from ray_cluster.engine.stages.autoencoder import Pixels
from tests.cell.local_service import LocalService, running_locally
from tests.e2e.edit_templates import pixels_of
from tests.e2e.service import HEADERS, images
from tests.engine.random_pipelines import SAVE

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.timeout(300)]

PROMPT = "a large blue star on a white background"
MOST_STEPS = 20_000
_AS_ASKED = {"use_resolution_binning": False, "clean_caption": False}
# what guidance_scale 3 is for each pipeline, and what else our calls set
GUIDED: dict[str, dict[str, Any]] = {
    "pixart": {"guidance_scale": 3.0, **_AS_ASKED},
    "qwen": {"true_cfg_scale": 3.0, "negative_prompt": " "},
    "z-image": {"guidance_scale": 2.0},
    "sana": {"guidance_scale": 3.0, **_AS_ASKED},
}
UNGUIDED: dict[str, dict[str, Any]] = {
    "pixart": {"guidance_scale": 1.0, **_AS_ASKED},
    "qwen": {"true_cfg_scale": 1.0},
    "z-image": {"guidance_scale": 0.0},
    "sana": {"guidance_scale": 1.0, **_AS_ASKED},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pipelines")
    saved = {name: save(root / name) for name, save in SAVE.items()}
    # as much noise in as many timesteps as the call has steps that is cancelled
    scheduler = diffusers.DPMSolverMultistepScheduler(
        num_train_timesteps=MOST_STEPS + 1, beta_start=5e-6, beta_end=1e-3
    )
    scheduler.save_pretrained(saved["pixart"] / "scheduler")
    return saved


@pytest.fixture(scope="module")
def called(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalService]:
    """A pool for each pipeline; nobody says what runs them."""
    defaults = {"size": "64x64", "num_inference_steps": 4}
    pools = [
        {
            "name": name,
            "model": str(folder),
            "max_px": 128,
            "max_num_inference_steps": MOST_STEPS,
            "defaults": defaults,
        }
        for name, folder in folders.items()
    ]
    more: dict[str, Any] = {"pools": pools, "cascades": [], "discriminators": []}
    edges = {"name": "edges", "model": "shapes-sd-edges", "bases": ["qwen"], "num_cpus": 0.2}
    more["controlnets"] = [edges]
    more["upscalers"] = [{"name": "big", "num_cpus": 0.2}]
    more["loras"] = {"folder": str(tmp_path_factory.mktemp("loras")), "sources": ["builtin:"]}
    with running_locally(tmp_path_factory.mktemp("called"), **more) as service:
        yield service


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def file_of(image: Image.Image) -> bytes:
    image.save(data := BytesIO(), "PNG")
    return data.getvalue()


def send(service: LocalService, model: str, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "model": model, "seed": 5, "guidance_scale": 3.0} | fields
    url = f"{service.url}/v1/images/generations"
    return httpx.post(url, json=body, headers=HEADERS, timeout=120)


def made(service: LocalService, model: str, **fields: Any) -> list[Pixels]:
    reply = send(service, model, **fields)
    assert reply.status_code == 200, reply.text
    return [pixels_of(one) for one in images(reply)]


def alone(
    folder: Path,
    seed: int = 5,
    size: tuple[int, int] = (64, 64),
    kind: Any = diffusers.DiffusionPipeline,
    parts: dict[str, Any] | None = None,
    **own: Any,
) -> Pixels:
    """What diffusers makes, in a process that has nothing else to do with it."""
    pipeline = kind.from_pretrained(folder, **(parts or {}))
    pipeline.set_progress_bar_config(disable=True)
    image = pipeline(
        prompt=PROMPT,
        width=size[0],
        height=size[1],
        num_inference_steps=4,
        generator=torch.Generator("cpu").manual_seed(seed),
        **own,
    ).images[0]
    assert isinstance(image, Image.Image)
    return np.asarray(image)


@pytest.mark.parametrize("name", SAVE)
def test_images_are_those_of_diffusers(
    name: str, called: LocalService, folders: dict[str, Path]
) -> None:
    several = made(called, name, n=3)
    for index, image in enumerate(several):
        assert np.array_equal(image, alone(folders[name], 5 + index, **GUIDED[name]))
    [other] = made(called, name, size="96x64", guidance_scale=1)
    assert np.array_equal(other, alone(folders[name], size=(96, 64), **UNGUIDED[name]))
    assert not np.array_equal(several[0], several[1])


def test_an_upscaler_follows(called: LocalService) -> None:
    [image] = made(called, "sana", upscale=2)
    assert image.shape == (128, 128, 3)


def test_a_negative_prompt_is_the_pipelines_own(
    called: LocalService, folders: dict[str, Path]
) -> None:
    for name in ("qwen", "z-image"):
        [image] = made(called, name, negative_prompt="a red circle")
        own = GUIDED[name] | {"negative_prompt": "a red circle"}
        assert np.array_equal(image, alone(folders[name], **own))
        assert not np.array_equal(image, alone(folders[name], **GUIDED[name]))


def test_the_card_says_what_runs_it(called: LocalService) -> None:
    cards = httpx.get(f"{called.url}/v1/models", headers=HEADERS).json()["data"]
    assert {one["id"]: one["engine"] for one in cards} == dict.fromkeys(SAVE, "diffusers")
    assert {one["id"]: (one["edits"], one["max_input_images"]) for one in cards} == {
        **dict.fromkeys(("pixart", "sana"), ("none", 0)),
        **dict.fromkeys(("qwen", "z-image"), ("any", 1)),
    }


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("pixart", "sampler", {"sampler": "lcm"}),
    ("qwen", "partial_images", {"partial_images": 2, "stream": True}),
    ("sana", "fidelity", {"fidelity": "balanced"}),
    ("z-image", "size", {"size": "65x64"}),
    ("z-image", "prompt", {"prompt": "star " * 200}),
    ("qwen", "negative_prompt", {"negative_prompt": "x", "guidance_scale": 1}),
]


@pytest.mark.parametrize(("model", "param", "fields"), REFUSED)
def test_what_a_pipeline_does_not_take_is_refused_by_name(
    model: str, param: str, fields: dict[str, Any], called: LocalService
) -> None:
    reply = send(called, model, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_loras_are_refused(called: LocalService) -> None:
    body = {"name": "pastel", "base": "qwen", "source": "builtin:pastel"}
    reply = httpx.post(f"{called.url}/v1/loras", json=body, headers=HEADERS)
    assert reply.status_code == 400, reply.text
    assert "run call by call" in reply.json()["error"]["message"]


def test_controlnets_are_refused(called: LocalService) -> None:
    drawn = send(called, "qwen").json()["data"][0]["b64_json"]
    reply = send(called, "qwen", controlnets=[{"name": "edges", "image": drawn}])
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == "controlnets[0].name"
    assert "run call by call" in error["message"]


def test_what_cannot_be_in_time_is_refused_before_it_is_begun(called: LocalService) -> None:
    """By what calls cost: thousands of steps in a second, and a few."""
    late = {"num_inference_steps": MOST_STEPS, "slo_s": 1, "when_late": "refuse"}
    reply = send(called, "qwen", **late)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["code"] == "deadline_too_short"
    assert len(made(called, "qwen", slo_s=60, when_late="refuse")) == 1


def test_an_edit_keeps_what_its_mask_spares(called: LocalService, folders: dict[str, Path]) -> None:
    """And is the sibling pipeline's where it edits."""
    template, mask = Image.effect_noise((64, 64), 90).convert("RGB"), Image.new("L", (64, 64))
    mask.paste(255, (8, 16, 40, 48))
    alpha = Image.merge("LA", [mask.point(lambda one: 255 - one)] * 2)
    own = GUIDED["qwen"] | {"image": template, "mask_image": mask, "strength": 0.75}
    kind = diffusers.QwenImageInpaintPipeline
    expected = np.where(
        np.asarray(mask)[..., None] > 0, alone(folders["qwen"], kind=kind, **own), template
    )
    body = {"prompt": PROMPT, "model": "qwen", "seed": 5, "guidance_scale": 3, "strength": 0.75}
    body |= {"image": coded(file_of(template)), "mask": coded(file_of(alpha))}
    reply = httpx.post(f"{called.url}/v1/images/edits", json=body, headers=HEADERS, timeout=60)
    assert reply.status_code == 200, reply.text
    assert np.array_equal(pixels_of(images(reply)[0]), expected)


@pytest.mark.parametrize("model", ["pixart", "sana"])
def test_an_edit_is_refused_without_a_sibling(model: str, called: LocalService) -> None:
    body = {"prompt": PROMPT, "model": model, "image": coded(file_of(Image.new("RGB", (64, 64))))}
    reply = httpx.post(f"{called.url}/v1/images/edits", json=body, headers=HEADERS, timeout=60)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model"), reply.text


def test_a_job_makes_the_same_image(called: LocalService, folders: dict[str, Path]) -> None:
    body = {"prompt": PROMPT, "model": "z-image", "seed": 5, "guidance_scale": 3}
    job = httpx.post(f"{called.url}/v1/jobs", json=body, headers=HEADERS).json()
    events = httpx.get(f"{called.url}/v1/jobs/{job['id']}/events", headers=HEADERS, timeout=60)
    assert "event: completed" in events.text, events.text[-300:]
    reply = ended(called, job["id"])
    assert reply["state"] == "completed", reply
    content = httpx.get(reply["data"][0]["url"], headers=HEADERS)
    assert content.status_code == 200
    assert np.array_equal(
        pixels_of(content.content), alone(folders["z-image"], **GUIDED["z-image"])
    )


def ended(service: LocalService, job_id: str) -> dict[str, Any]:
    for _ in range(600):
        found = httpx.get(f"{service.url}/v1/jobs/{job_id}", headers=HEADERS).json()
        if found["state"] not in {"queued", "running"}:
            return dict(found)
        time.sleep(0.05)
    raise AssertionError(f"it does not end: {found}")


def test_a_stream_ends_with_the_image(called: LocalService, folders: dict[str, Path]) -> None:
    reply = send(called, "sana", stream=True)
    assert reply.status_code == 200, reply.text
    events = [
        json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")
    ]
    assert events[-1]["type"] == "image_generation.completed"
    image = pixels_of(base64.b64decode(events[-1]["b64_json"]))
    assert np.array_equal(image, alone(folders["sana"], **GUIDED["sana"]))


@pytest.mark.parametrize("name", ["pixart", "qwen"])
def test_a_cancelled_call_frees_the_pool_at_the_end_of_a_step(
    name: str, called: LocalService
) -> None:
    """Both kinds of callbacks; the call would take a minute or more."""
    body = {"prompt": PROMPT, "model": name, "num_inference_steps": MOST_STEPS, "guidance_scale": 1}
    job = httpx.post(f"{called.url}/v1/jobs", json=body, headers=HEADERS).json()
    url = f"{called.url}/v1/jobs/{job['id']}"
    for _ in range(400):
        found = httpx.get(url, headers=HEADERS).json()
        if found["step"] > 2:
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"no progress: {found}")
    assert httpx.delete(url, headers=HEADERS).status_code in {200, 202, 204}
    began_s = time.monotonic()
    made(called, name)
    assert time.monotonic() - began_s < 5
    assert ended(called, job["id"])["state"] == "cancelled"


def test_many_at_once_are_made_one_by_one(called: LocalService, folders: dict[str, Path]) -> None:
    found: dict[int, Pixels] = {}

    def one(seed: int) -> None:
        [found[seed]] = made(called, "z-image", seed=seed)

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (0, 5):
        assert np.array_equal(found[seed], alone(folders["z-image"], seed, **GUIDED["z-image"]))
