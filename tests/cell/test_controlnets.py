"""ControlNets as services of a cell: exact, and followed."""

from __future__ import annotations

import base64
import logging
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from ray_cluster.quality.distances import edge_agreement, find_edges
from tests.cell.local_service import LocalService
from tests.e2e.controlled import base64_of, hinted, truth
from tests.e2e.edit_templates import pixels_of, png
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import API_KEY, HEADERS, Reached

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.timeout(600)]

NUM_FOLLOWED = 48
# of 1002 images, with a standard deviation of 0.17 each
AGREEMENT_ON_CARD = 0.893
NUM_ON_CARD, REPEATS_ON_CARD = 334, 3
# of the few above
LEAST_AGREEMENT = 0.84


def post(service: Reached, **fields: Any) -> httpx.Response:
    """Send a call for one image; again while the queue is full."""
    while True:
        reply = httpx.post(
            f"{service.url}/v1/images/generations",
            json={"size": "64x64", "slo_s": 300} | fields,
            headers=HEADERS,
            timeout=300,
        )
        if reply.status_code != 429:
            return reply
        time.sleep(float(reply.headers["retry-after"]))


def make(service: Reached, **fields: Any) -> bytes:
    reply = post(service, **fields)
    assert reply.status_code == 200, reply.text
    return base64.b64decode(reply.json()["data"][0]["b64_json"])


def are_equal(one: bytes, other: bytes) -> bool:
    """Whether two images differ by rounding alone, which depends on a batch."""
    return pixels_differ(one, other) <= 1


def uses_of(number: int, *names: str, **fields: Any) -> list[dict[str, Any]]:
    _, maps = hinted(NUM_FOLLOWED)
    return [{"name": name, "image": base64_of(maps[name][number])} | fields for name in names]


# by the number of a call, modulo their number
KINDS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("edges",), {}),
    (("layout",), {"scale": 0.7}),
    (("edges", "layout"), {"start": 0.1, "end": 0.8}),
    ((), {}),
)
OF_PIPELINE = {
    "scale": "controlnet_conditioning_scale",
    "start": "control_guidance_start",
    "end": "control_guidance_end",
}


# one of each kind, or three
@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_mixed_calls_get_the_images_of_diffusers(service: LocalService, count: int) -> None:
    texts, maps = hinted(NUM_FOLLOWED)

    def one(number: int) -> bytes:
        names, fields = KINDS[number % len(KINDS)]
        uses = {"controlnets": uses_of(number, *names, **fields)} if names else {}
        return make(service, prompt=texts[number], seed=number, **uses)

    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(one, range(count)))
    for number, image in enumerate(images):
        names, fields = KINDS[number % len(KINDS)]
        options: dict[str, Any] = {OF_PIPELINE[key]: value for key, value in fields.items()}
        if len(names) == 2:
            options = {key: [value, value] for key, value in options.items()}
        # without any, one that does nothing
        options = options or ({} if names else {"controlnet_conditioning_scale": 0.0})
        own = {name: maps[name][number] for name in names or ("edges",)}
        expected = truth(texts[number], number, own, **options)
        assert np.abs(pixels_of(image) - expected).max() <= 1, number
    others = pixels_of(images[0]) - pixels_of(
        make(service, prompt=texts[0], seed=0, controlnets=uses_of(1, "edges"))
    )
    assert np.abs(others).max() > 20


def agreement_of(service: LocalService, count: int, *, repeats: int = 1) -> float:
    """Return how well the edges of images agree with those asked for: the mean F1 within a pixel.

    Args:
        count: prompts, each with a map of its own.
        repeats: images of each.
    """
    texts, maps = hinted(count)

    def one(number: int) -> bytes:
        own = number % count
        uses = [{"name": "edges", "image": base64_of(maps["edges"][own])}]
        return make(service, prompt=texts[own], seed=1000 + number, controlnets=uses)

    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(one, range(repeats * count)))
    stacked = np.stack([pixels_of(image) for image in images])
    found = find_edges(torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255)
    wanted = torch.from_numpy(maps["edges"][..., 0] > 127).repeat(repeats, 1, 1)
    agreement = edge_agreement(found, wanted)
    logger.warning(
        "edges of %d images agree: %.3f +- %.3f", len(images), agreement.mean(), agreement.std()
    )
    return float(agreement.mean())


@pytest.mark.parametrize("count", [12, pytest.param(NUM_FOLLOWED, marks=pytest.mark.slow)])
def test_edges_are_where_the_maps_have_them(service: LocalService, count: int) -> None:
    assert agreement_of(service, count) >= LEAST_AGREEMENT


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_edges_agree_as_well_as_the_card_says(service: LocalService) -> None:
    # the card's prompts, as many images of each
    agreement = agreement_of(service, NUM_ON_CARD, repeats=REPEATS_ON_CARD)
    assert agreement == pytest.approx(AGREEMENT_ON_CARD, abs=0.02)


def test_loras_and_controlnets_go_together(service: LocalService) -> None:
    texts, _ = hinted(NUM_FOLLOWED)
    uses = uses_of(0, "edges")
    both = make(service, prompt=texts[0], seed=1, controlnets=uses, loras=[{"name": "texture"}])
    alone = make(service, prompt=texts[0], seed=1, controlnets=uses)
    assert not are_equal(both, alone)
    again = make(service, prompt=texts[0], seed=1, controlnets=uses, loras=[{"name": "texture"}])
    assert are_equal(both, again)


def test_the_command_line_sends_maps(service: LocalService, tmp_path: Path) -> None:
    texts, maps = hinted(NUM_FOLLOWED)
    sketch, out = tmp_path / "sketch.png", tmp_path / "out.png"
    sketch.write_bytes(png(maps["edges"][2]))
    command = [str(Path(sys.executable).with_name("ray-cluster")), "generate", texts[2]]
    command += ["--control", f"edges={sketch}", "--seed", "7", "--size", "64x64", "-o", str(out)]
    command += ["--url", service.url, "--api-key", API_KEY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    same = make(service, prompt=texts[2], seed=7, controlnets=uses_of(2, "edges"))
    assert are_equal(out.read_bytes(), same)


def test_wrong_ones_are_refused_before_any_work(service: LocalService) -> None:
    texts, _ = hinted(NUM_FOLLOWED)
    for uses, words in (
        (uses_of(0, "edges", start=0.8, end=0.2), "start"),
        ([uses_of(0, "edges")[0] | {"name": "edgse"}], "edges"),
        ([uses_of(0, "edges")[0] | {"image": "bm8gaW1hZ2U="}], "image"),
        (uses_of(0, "edges") * 4, "at most 3"),
    ):
        reply = post(service, prompt=texts[0], controlnets=uses)
        assert reply.status_code == 400, reply.text
        assert words in reply.json()["error"]["message"]
