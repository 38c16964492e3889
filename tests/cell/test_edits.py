"""Edits through the running service: random ones, what they show, and the command line."""

from __future__ import annotations

import base64
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
import torch

from ray_cluster.models.picture_reader import ANCHOR_OFFSET
from ray_cluster.quality.captions import write_caption
from ray_cluster.quality.classifier import load_classifier, read_pictures
from ray_cluster.quality.scenes import (
    COLOURS,
    POSITIONS,
    SHAPES,
    Scene,
    SceneObject,
    sample_single,
)
from recipes.figures.scoring import Drawn
from tests.cell.local_service import LocalService
from tests.e2e import drawn_edits
from tests.e2e.drawn_edits import Outcome
from tests.e2e.edit_templates import Template, mask_png, pixels_of
from tests.e2e.openai_clients import OLDER_CLIENT
from tests.e2e.service import API_KEY, HEADERS

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.xdist_group("local"), pytest.mark.timeout(400)]

SIDE_PX = 64
# around an object of the reference model's images, which is 14 px at most from its middle
HALF_PX = 18
# all are right; so few must not fail by chance
LEAST_RIGHT = 0.9


def drawn(service: LocalService, seeds: range, *, older: bool = False) -> list[Outcome]:
    """Make the edits of these seeds by a client in a process of its own."""
    environment = dict(os.environ)
    if older:
        assert OLDER_CLIENT.is_dir(), "the Makefile installs it: run `make venv`"
        environment["PYTHONPATH"] = str(OLDER_CLIENT)
    arguments = (service.url, API_KEY, str(seeds.start), str(len(seeds)))
    done = subprocess.run(
        [sys.executable, drawn_edits.__file__, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout)
    assert (found["version"].split(".")[0] == "1") is older
    return [Outcome(**one) for one in found["outcomes"]]


def check(outcomes: Collection[Outcome], least: int) -> None:
    """Nothing outside a mask has changed; and the comparison would have told.

    Args:
        least: pixels outside masks that were compared, for fear of having compared nothing.
    """
    for one in outcomes:
        assert list(one.size_px) == list(one.expected_px), one.kind
        if one.is_pasted:
            assert one.changed_outside == 0, f"seed {one.seed}: {one.kind}"
        elif one.outside > 100:
            # not pasted back: the autoencoder changes nearly everything
            assert one.changed_outside > 0.3 * one.outside, f"seed {one.seed}: {one.kind}"
    pasted = [one for one in outcomes if one.is_pasted]
    assert sum(one.outside for one in pasted) > least
    # the border of a feathered mask may keep its pixels
    inside = sum(one.inside for one in pasted)
    assert sum(one.changed_inside for one in pasted) > 0.8 * inside
    logger.warning(
        "%d edits, %d pasted back: 0 of %d pixels outside masks changed, %d of %d inside",
        *(len(outcomes), len(pasted), sum(one.outside for one in pasted)),
        *(sum(one.changed_inside for one in pasted), inside),
    )


def test_random_edits_change_nothing_outside_their_masks(service: LocalService) -> None:
    with ThreadPoolExecutor(1) as pool:
        older = pool.submit(drawn, service, range(1000, 1004), older=True)
        outcomes = drawn(service, range(10))
        outcomes += older.result()
    check(outcomes, least=20_000)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("older", [False, True], ids=["current client", "older client"])
def test_250_random_edits_change_nothing_outside_their_masks(
    service: LocalService, older: bool
) -> None:
    check(drawn(service, range(2000 + 250 * older, 2250 + 250 * older), older=older), 500_000)


def post(service: LocalService, path: str, **fields: Any) -> bytes:
    """Return the one image of a call; sent again while the queue is full."""
    while True:
        reply = httpx.post(
            f"{service.url}/v1/images/{path}", json=fields, headers=HEADERS, timeout=120
        )
        if reply.status_code != 429:
            break
        time.sleep(float(reply.headers["retry-after"]))
    assert reply.status_code == 200, reply.text
    [image] = reply.json()["data"]
    return base64.b64decode(image["b64_json"])


def changed_scene(seed: int) -> tuple[Scene, Scene]:
    """Return a scene of one object, and one with another shape of another colour in its place."""
    chance = random.Random(seed)
    before = sample_single(chance)
    [thing] = before.objects
    other = SceneObject(
        chance.choice([one for one in SHAPES if one != thing.shape]),
        chance.choice([one for one in COLOURS if one != thing.colour]),
        "large",
        thing.position,
    )
    return before, replace(before, objects=(other,))


def around(scene: Scene) -> npt.NDArray[np.bool_]:
    """Return a mask of a square around the object of a scene."""
    position = scene.objects[0].position
    assert position is not None
    middles = [
        SIDE_PX / 2 + SIDE_PX * ANCHOR_OFFSET * (one - 1)
        for one in divmod(POSITIONS.index(position), 3)
    ]
    down, across = (np.abs(np.arange(SIDE_PX) + 0.5 - middle) < HALF_PX for middle in middles)
    return down[:, None] & across[None]


@pytest.mark.parametrize("count", [6, pytest.param(16, marks=pytest.mark.slow)])
def test_an_edit_shows_what_was_asked_inside_its_mask(service: LocalService, count: int) -> None:
    """The template's object is gone, another is in its place, and nothing else has come."""

    def make(seed: int) -> tuple[bytes, bytes]:
        before, after = changed_scene(seed)
        size = f"{SIDE_PX}x{SIDE_PX}"
        template = post(service, "generations", prompt=write_caption(before), seed=seed, size=size)
        images = {"image": template, "mask": mask_png(around(before))}
        fields = {name: base64.b64encode(data).decode() for name, data in images.items()}
        return template, post(service, "edits", prompt=write_caption(after), seed=seed, **fields)

    with ThreadPoolExecutor(8) as pool:
        templates, edited = zip(*pool.map(make, range(count)), strict=True)
    wanted = [changed_scene(seed)[1] for seed in range(count)]
    right, right_before = share_right(wanted, edited), share_right(wanted, templates)
    logger.warning("edits that show what was asked: %.2f; templates: %.2f", right, right_before)
    assert right >= LEAST_RIGHT
    assert right_before == 0, "the templates show something else, and the judge must see it"


def share_right(scenes: Collection[Scene], images: Collection[bytes]) -> float:
    """Return the share of images that show their scene and nothing beside it."""
    stacked = np.stack([pixels_of(one) for one in images])
    pictures = torch.from_numpy(stacked).permute(0, 3, 1, 2).float() / 255
    readings = read_pictures(load_classifier(), pictures)
    rows = zip(scenes, pictures, readings, strict=True)
    return float(np.mean([Drawn(*row).all_right for row in rows]))


def test_a_feather_blends_within_the_mask_only(service: LocalService) -> None:
    template, feather_px = Template.of(3), 6
    plain, feathered = (
        pixels_of(
            post(
                service,
                "edits",
                prompt="a large red circle",
                seed=3,
                feather_px=width_px,
                **template.fields,
            )
        )
        for width_px in (0, feather_px)
    )
    original = pixels_of(template.image)
    assert (feathered[~template.inside] == original[~template.inside]).all()
    outside = np.argwhere(~template.inside)
    points = np.argwhere(template.inside)
    distance_px = np.full(template.inside.shape, 0.0)
    apart = np.hypot(*(points[:, None] - outside[None]).transpose(2, 0, 1))
    distance_px[template.inside] = apart.min(axis=1)
    # images made with others may differ by a level
    deep = distance_px >= feather_px + 1
    assert np.abs(feathered[deep] - plain[deep]).max() <= 1
    border = template.inside & ~deep
    lowest, highest = np.minimum(plain, original), np.maximum(plain, original)
    assert (feathered[border] >= lowest[border] - 1).all()
    assert (feathered[border] <= highest[border] + 1).all()
    # next to the edge little of the edit is seen, and more further in
    near, far = border & (distance_px < 2), border & (distance_px > feather_px)
    share = [
        np.abs(feathered[one] - original[one]).sum() / np.abs(plain[one] - original[one]).sum()
        for one in (near, far)
    ]
    assert share[0] < 0.4
    assert share[1] > 0.7


def test_the_command_line_edits_at_the_service(service: LocalService, tmp_path: Path) -> None:
    template = Template.of(4)
    for name in ("image", "mask"):
        (tmp_path / f"{name}.png").write_bytes(getattr(template, name))
    done = subprocess.run(
        [
            str(Path(sys.executable).with_name("ray-cluster")),
            *("generate", "a large red circle in the center on a black background"),
            *("--edit", str(tmp_path / "image.png"), "--mask", str(tmp_path / "mask.png")),
            *("--seed", "4", "--steps", "10", "-o", str(tmp_path / "edited.png")),
            *("--url", service.url, "--api-key", API_KEY),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert template.is_kept_in((tmp_path / "edited.png").read_bytes())
