"""LoRAs through the running service: styles in one batch, the registry, and what may go wrong."""

from __future__ import annotations

import base64
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI
from typer.testing import CliRunner

from ray_cluster.cli.app import app
from ray_cluster.models.builtin import weights_folder
from ray_cluster.quality.classifier import load_classifier, read_pictures
from tests.cell.local_service import LocalService
from tests.e2e.edit_templates import pixels_of
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import API_KEY, HEADERS, STYLE_LORAS, Reached

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.timeout(400)]

PROMPT = "a large red circle left of a small blue square on a white background"
# their cards say 99.8 % and more; so few must not fail by chance
LEAST_RIGHT = 0.85


def make(service: Reached, **fields: Any) -> dict[str, Any]:
    """Return the reply of a call for one image; sent again while the queue is full."""
    while True:
        body = {"prompt": PROMPT, "size": "64x64", "seed": 1} | fields
        reply = httpx.post(
            f"{service.url}/v1/images/generations", json=body, headers=HEADERS, timeout=120
        )
        if reply.status_code != 429:
            break
        time.sleep(float(reply.headers["retry-after"]))
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def image_of(reply: dict[str, Any]) -> bytes:
    return base64.b64decode(reply["data"][0]["b64_json"])


def are_equal(one: bytes, other: bytes) -> bool:
    """Whether images differ by rounding alone: LoRAs may be merged into the weights or not."""
    return pixels_differ(one, other) <= 1


def post_lora(service: Reached, **fields: Any) -> httpx.Response:
    url = f"{service.url}/v1/loras"
    return httpx.post(url, json={"base": "shapes-sd"} | fields, headers=HEADERS, timeout=30)


def lora(service: Reached, name: str) -> dict[str, Any]:
    reply = httpx.get(f"{service.url}/v1/loras/{name}", headers=HEADERS, timeout=30)
    found: dict[str, Any] = reply.json()
    return found


def until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain for {what}"
        time.sleep(0.1)


@pytest.mark.parametrize("of_each", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_each_request_has_its_own_style_and_none_has_another_s(
    service: LocalService, of_each: int
) -> None:
    """Four kinds of requests at once on two replicas: they share batches."""
    wanted = [style for style in (*STYLE_LORAS, "plain") for _ in range(of_each)]

    def one(number: int) -> bytes:
        style = wanted[number]
        fields = {} if style == "plain" else {"loras": [{"name": style, "scale": 1.0}]}
        reply = make(service, seed=number, **fields)
        return image_of(reply)

    order = np.random.default_rng(0).permutation(len(wanted)).tolist()
    with ThreadPoolExecutor(16) as pool:
        images = dict(zip(order, pool.map(one, order), strict=True))
    stacked = np.stack([pixels_of(images[number]) for number in range(len(wanted))])
    pictures = torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255
    readings = read_pictures(load_classifier(), pictures)
    right = [reading.style == style for reading, style in zip(readings, wanted, strict=True)]
    shares = {
        style: np.mean([ok for ok, name in zip(right, wanted, strict=True) if name == style])
        for style in dict.fromkeys(wanted)
    }
    logger.warning("images in their style: %s", shares)
    assert min(shares.values()) >= LEAST_RIGHT, shares


def test_a_lora_is_a_model_name_and_scales_count(service: LocalService) -> None:
    client = OpenAI(base_url=f"{service.url}/v1", api_key=API_KEY, max_retries=5)
    names = [model.id for model in client.models.list()]
    assert {f"shapes-sd:{name}" for name in STYLE_LORAS} <= set(names)
    by_name = client.images.generate(
        model="shapes-sd:pastel",
        prompt=PROMPT,
        size="64x64",
        extra_body={"seed": 5},  # type: ignore[arg-type]
    )
    assert by_name.data
    styled = base64.b64decode(by_name.data[0].b64_json or "")
    same = image_of(make(service, seed=5, loras=[{"name": "pastel"}]))
    half = image_of(make(service, seed=5, loras=[{"name": "pastel", "scale": 0.5}]))
    plain = image_of(make(service, seed=5))
    assert are_equal(styled, same)
    for other in (half, plain):
        assert np.abs(pixels_of(styled).astype(int) - pixels_of(other)).max() > 20


def test_one_is_registered_used_and_removed_while_it_is_used(service: LocalService) -> None:
    source = weights_folder() / "outline" / "pytorch_lora_weights.safetensors"
    file = service.folder / "mine.safetensors"
    shutil.copy(source, file)
    reply = post_lora(service, name="mine", source=str(file))
    assert reply.status_code == 201, reply.text
    assert post_lora(service, name="mine", source=str(file)).status_code == 200
    assert post_lora(service, name="mine", source="builtin:pastel").status_code == 409
    # it has the very factors of the built-in one
    mine = image_of(make(service, seed=9, loras=[{"name": "mine", "scale": 0.7}]))
    outline = image_of(make(service, seed=9, loras=[{"name": "outline", "scale": 0.7}]))
    assert are_equal(mine, outline)
    found = lora(service, "mine")
    assert found["state"] == "ready", found
    with ThreadPoolExecutor(1) as pool:
        fields = {"loras": [{"name": "mine"}], "num_inference_steps": 120}
        making = pool.submit(make, service, **fields)
        time.sleep(0.5)
        gone = httpx.delete(f"{service.url}/v1/loras/mine", headers=HEADERS, timeout=30)
        assert gone.status_code == 200, gone.text
        refused = httpx.post(
            f"{service.url}/v1/images/generations",
            json={"prompt": PROMPT, "loras": [{"name": "mine"}]},
            headers=HEADERS,
            timeout=30,
        )
        assert refused.status_code == 400, refused.text
        assert image_of(making.result())


@pytest.mark.parametrize("kind", ["damaged", "pickled", "outside", "too large"])
def test_a_wrong_file_is_refused_with_the_reason(
    service: LocalService, tmp_path: Path, kind: str
) -> None:
    file = service.folder / f"{kind.replace(' ', '-')}.safetensors"
    file.write_bytes(b"\x80\x04no weights" * 10)
    if kind == "pickled":
        torch.save({"x": torch.zeros(1)}, file.with_suffix(".bin"))
        file = file.with_suffix(".bin")
    elif kind == "too large":
        file.write_bytes(b"\0" * 10_000_001)
    elif kind == "outside":
        shutil.copy(weights_folder() / "outline" / "pytorch_lora_weights.safetensors", tmp_path)
        file.unlink()
        file.symlink_to(tmp_path / "pytorch_lora_weights.safetensors")
    name = file.stem
    reply = post_lora(service, name=name, source=str(file))
    if reply.status_code == 201:
        refused = httpx.post(
            f"{service.url}/v1/images/generations",
            json={"prompt": PROMPT, "loras": [{"name": name}]},
            headers=HEADERS,
            timeout=60,
        )
        assert refused.status_code == 400, refused.text
        assert "LoRA" in refused.json()["error"]["message"]
        assert lora(service, name)["state"] == "failed"
    else:
        assert reply.status_code == 400, reply.text
    assert make(service)["data"]


@contextmanager
def silent_server(port: int) -> Iterator[None]:
    """Accept connections, and never answer."""
    listener = socket.create_server(("127.0.0.1", port))
    held: list[socket.socket] = []

    def accept() -> None:
        while True:
            try:
                held.append(listener.accept()[0])
            except OSError:
                return

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield
    finally:
        # close alone does not end an accept that waits
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
        for one in held:
            one.close()


def test_a_silent_source_holds_up_nobody_else(service: LocalService) -> None:
    with silent_server(service.lora_port), ThreadPoolExecutor(4) as pool:
        url = f"http://127.0.0.1:{service.lora_port}/slow.safetensors"
        assert post_lora(service, name="slow", source=url).status_code == 201

        def ask() -> httpx.Response:
            body = {"prompt": PROMPT, "loras": [{"name": "slow"}], "slo_s": 60}
            return httpx.post(
                f"{service.url}/v1/images/generations", json=body, headers=HEADERS, timeout=120
            )

        waiting = [pool.submit(ask) for _ in range(3)]
        until(lambda: lora(service, "slow")["state"] == "fetching", "the fetch to begin")
        others = [make(service, seed=seed, loras=[{"name": "texture"}]) for seed in range(4)]
        assert all(one["data"] for one in others)
        for one in waiting:
            reply = one.result()
            assert reply.status_code == 503, reply.text
            assert reply.json()["error"]["code"] == "lora_unavailable"
    httpx.delete(f"{service.url}/v1/loras/slow", headers=HEADERS, timeout=30)


def test_the_command_line_knows_them(service: LocalService, tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [*arguments, "--url", service.url, "--api-key", API_KEY]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "pastel" in run("loras", "list")
    run("loras", "add", "again", "--base", "shapes-sd", "--source", "builtin:pastel")
    out = tmp_path / "styled.png"
    run("generate", PROMPT, "--lora", "again:0.8", "--seed", "4", "-o", str(out))
    expected = image_of(make(service, seed=4, loras=[{"name": "pastel", "scale": 0.8}]))
    assert are_equal(out.read_bytes(), expected)
    like = tmp_path / "like.png"
    run("generate", "--like", str(out), "-o", str(like))
    assert are_equal(like.read_bytes(), expected)
    run("loras", "remove", "again")
    assert "again" not in run("loras", "list")
