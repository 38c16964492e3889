"""Pictures as people have them, in each role: seen as viewers show them, or refused by name."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from ray_cluster.imaging.edit_images import edit_pixels, finished
from ray_cluster.requests import ImageRequest
from tests.api.controlnet_calls import RED, controls_fake, controls_http, entry, map_of
from tests.api.edit_calls import post_form
from tests.fakes import FakeDispatcherClient
from tests.imaging.pictures import file_of, gradient, mask_file
from tests.imaging.random_pictures import Levels, Picture, picture

logger = logging.getLogger(__name__)
ROLES = ("template", "template", "mask", "map")
# blending with white, and resizing, round once more
_ROUNDED = 1.0


def on_white(seen: Levels) -> Levels:
    share = seen[..., 3:] / 255
    return seen[..., :3] * share + 255 * (1 - share)


def brought_to(seen: Levels, size_px: tuple[int, int]) -> Levels:
    """Return what is seen, at another size, by Pillow's Lanczos."""
    image = Image.fromarray(on_white(seen).round().astype(np.uint8))
    return np.asarray(image.resize(size_px, Image.Resampling.LANCZOS)).astype(float)


def gap(found: npt.NDArray[Any], wanted: Levels) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found.astype(float) - wanted).max(initial=0.0))


class Trial:
    """A service, and what has come of the pictures that were sent to it."""

    def __init__(self, http: httpx.AsyncClient, fake: FakeDispatcherClient, url: str) -> None:
        self._http, self._fake, self._url = http, fake, url
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.worst: dict[str, float] = {}
        self.wrong: list[str] = []

    async def send(self, seed: int) -> None:
        one, role = picture(seed), ROLES[seed % len(ROLES)]
        reply = await getattr(self, f"_{role}")(one)
        self.counts[f"{role}: {reply.status_code}"] += 1
        if reply.status_code == 200:
            if one.seen is None:
                self.wrong.append(f"{seed}: {one.kind} was accepted as {role}")
                return
            off = getattr(self, f"_off_{role}")(one, self._fake.offered[-1][0])
            key = f"{role} {one.kind}"
            self.worst[key] = max(off, self.worst.get(key, 0.0))
            if off > one.tolerance + _ROUNDED:
                self.wrong.append(f"{seed}: {key} {one.data[:4]!r} is off by {off:.1f}")
            return
        error = reply.json()["error"]
        names = error.get("param") or ""
        self.refusals[f"{role} {one.kind}: {error['code']}: {error['message'][:90]}"] += 1
        may_be = one.seen is None or (
            role == "mask" and (not one.has_alpha or "nothing to edit" in error["message"])
        )
        if reply.status_code != 400 or not may_be or role_of(names) != role:
            self.wrong.append(f"{seed}: {role} {one.kind}: {reply.status_code} {reply.text[:300]}")

    async def _template(self, one: Picture) -> httpx.Response:
        height, width = (1, 1) if one.seen is None else one.seen.shape[:2]
        edited = np.zeros((height, width), np.bool_)
        edited[height // 3 : height // 2 + 1, width // 3 :] = True
        return await post_form(self._http, one.data, mask_file(edited))

    def _off_template(self, one: Picture, request: ImageRequest) -> float:
        """By how much what is returned differs outside the mask, in levels."""
        edit = request.edit
        assert one.seen is not None
        height, width = one.seen.shape[:2]
        if edit is None:
            # all of it is edited
            assert 1 in (height, width)
            return 0.0
        edited = np.zeros((height, width), np.bool_)
        edited[height // 3 : height // 2 + 1, width // 3 :] = True
        pixels = edit_pixels(one.data, mask_file(edited), edit, request.size_px)
        made = np.full_like(pixels.work, 77)
        assert pixels.weights is not None
        outside = pixels.weights == 0
        if edit.canvas_px == (width, height):
            assert np.array_equal(outside, ~edited)
            wanted = on_white(one.seen)
        else:
            wanted = brought_to(one.seen, edit.canvas_px)
        return gap(finished(made, pixels, edit.window)[outside], wanted[outside])

    async def _mask(self, one: Picture) -> httpx.Response:
        height, width = (64, 64) if one.seen is None else one.seen.shape[:2]
        return await post_form(self._http, file_of(gradient(width, height)), one.data)

    def _off_mask(self, one: Picture, request: ImageRequest) -> float:
        edit = request.edit
        assert one.seen is not None
        if edit is None:
            # all of it is edited
            return 255.0 * bool((one.seen[..., 3] >= 128).any())
        height, width = one.seen.shape[:2]
        pixels = edit_pixels(file_of(gradient(width, height)), one.data, edit, request.size_px)
        assert pixels.weights is not None
        if edit.canvas_px != (width, height):
            return 0.0
        # deep alpha may be rounded to either side of the half
        sure = np.abs(one.seen[..., 3] - 127.5) > one.tolerance
        wrong = (pixels.weights > 0) != (one.seen[..., 3] < 127.5)
        return 255.0 * bool((wrong & sure).any())

    async def _map(self, one: Picture) -> httpx.Response:
        body = {**RED, "controlnets": [entry("edges", one.data)]}
        return await self._http.post("/v1/images/generations", json=body)

    def _off_map(self, one: Picture, request: ImageRequest) -> float:
        assert one.seen is not None
        found = map_of(self._url, request)
        return gap(found, brought_to(one.seen, found.shape[1::-1]))


def role_of(param: str) -> str:
    return {"image": "template", "mask": "mask"}.get(param, "map" if "controlnets" in param else "")


@pytest.mark.parametrize(
    "num_pictures",
    [100, pytest.param(3000, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])],
)
async def test_pictures_are_seen_as_viewers_show_them_or_refused_by_name(
    tmp_path: Path, num_pictures: int
) -> None:
    fake, url = controls_fake(), (tmp_path / "inputs").as_uri()
    async with controls_http(fake, url) as http:
        trial = Trial(http, fake, url)
        for seed in range(num_pictures):
            await trial.send(seed)
    for what in (trial.counts, trial.refusals, trial.worst):
        logger.warning("%s", "\n".join(f"{value:6} {key}" for key, value in sorted(what.items())))
    assert not trial.wrong, "\n".join(trial.wrong[:40])
    accepted = sum(count for key, count in trial.counts.items() if key.endswith("200"))
    assert accepted > 0.6 * num_pictures
