"""Whatever `controlnets` holds, and whatever its images are: a 2xx or a clear refusal."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.checks import URL, error_of
from tests.api.controlnet_calls import RED, SKETCH, controls_fake, controls_http
from tests.api.edit_calls import EDITS, IMAGE, MASK, VARIATIONS, coded, mask_of, parts
from tests.imaging.hostile import hostile_files

logger = logging.getLogger(__name__)

NESTED: Any = {"a": [{"a": [[[[]]]]}]}
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 0.5, 2, 2.0000001, 1e308, -0.0, 10**400, 2**63),
    *("", " ", "none", "canny", "invert", "scribble", "openpose", "midas", "CANNY", "\0", "\ud800"),
    *("edges", "layout", "poses", "Edges", "x" * 65, "../../etc/passwd", "@", "@image", "@sketch"),
    *("file-", "file-" + "0" * 64 + "-5", "file-" + "0" * 64 + "-" + "9" * 30, "data:,", "data:"),
    *(
        [],
        {},
        [[]],
        NESTED,
        {"image_url": 5},
        {"file_id": None},
        {"image_url": "a", "file_id": "b"},
    ),
    *("🙂" * 40, "http://169.254.169.254/", "file:///etc/passwd", "AAAA", "=" * 8, "A" * 3000),
)
KEYS = ("name", "image", "preprocess", "scale", "start", "end", "weight", "", "\ud800", "image_url")


class Maker:
    """Makes up calls; the same for a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._files = list(hostile_files(150, seed))

    def controlnets(self) -> object:
        rng = self._rng
        if rng.random() < 0.1:
            return rng.choice(VALUES)
        return [self._entry() for _ in range(rng.choice([1, 1, 1, 2, 3, 4]))]

    def _entry(self) -> object:
        rng = self._rng
        if rng.random() < 0.05:
            return rng.choice(VALUES)
        one: dict[str, Any] = {"name": rng.choice(["edges", "layout"]), "image": self._image()}
        if rng.random() < 0.5:
            one["preprocess"] = rng.choice(["canny", "invert", "scribble", "none"])
        if rng.random() < 0.5:
            keys = rng.sample(KEYS, rng.choice([1, 1, 2, 4]))
            one |= {key: rng.choice(VALUES) for key in keys}
        return one

    def _image(self) -> object:
        rng = self._rng
        data = rng.choice([SKETCH, MASK, rng.choice(self._files)])
        text = coded(data)
        return rng.choice([text, text, f"data:image/png;base64,{text}", {"image_url": text}])

    async def send(self, http: httpx.AsyncClient) -> httpx.Response:
        rng = self._rng
        body: dict[str, Any] = {**RED, "controlnets": self.controlnets()}
        path = rng.choice([URL, URL, EDITS, EDITS, VARIATIONS])
        if path == URL:
            return await self._json(http, path, body)
        if rng.random() < 0.5:
            files = {"image": IMAGE} | ({"mask": MASK} if path == EDITS else {})
            if rng.random() < 0.5:
                files["sketch"] = rng.choice([SKETCH, rng.choice(self._files)])
            try:
                sent = parts(files, {**RED, "controlnets": json.dumps(body["controlnets"])})
                return await http.post(path, files=sent)
            except UnicodeEncodeError:
                return await self._json(http, path, body)
        if rng.random() < 0.3 and path == EDITS:
            body |= {"mask": coded(mask_of((20, 20, 8, 8))), "crop": "auto"}
        return await self._json(http, path, {**body, "image": coded(IMAGE)})

    async def _json(
        self, http: httpx.AsyncClient, path: str, body: dict[str, Any]
    ) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return await http.post(path, content=json.dumps(body), headers=headers)


@pytest.mark.parametrize("num_calls", [120, pytest.param(400, marks=pytest.mark.slow)])
async def test_hostile_controlnets_are_images_or_clear_refusals(
    tmp_path: Path, num_calls: int
) -> None:
    fake, maker = controls_fake(), Maker(36)
    statuses: Counter[int] = Counter()
    limits = {"max_body_bytes": 1 << 20, "max_input_pixels": 1 << 20}
    async with controls_http(fake, str(tmp_path), **limits) as http:
        for _ in range(num_calls):
            num_offered = len(fake.offered)
            reply = await maker.send(http)
            statuses[reply.status_code] += 1
            assert reply.status_code < 500, reply.text
            is_offered = len(fake.offered) > num_offered
            assert is_offered is (reply.status_code == 200), reply.text
            if not is_offered:
                error_of(reply)
                continue
            for use in fake.offered[-1][0].add_ons.controls:
                assert 0 <= use.scale <= 2
                assert 0 <= use.start < use.end <= 1
                assert len(use.sent_sha256) == 64
    logger.info("statuses: %s", dict(statuses))
    # both ends are reached
    assert statuses[200] > num_calls / 10
    assert statuses[400] > num_calls / 3
