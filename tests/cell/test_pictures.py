"""Pictures as people have them, edited end to end: outside the mask they look as they did."""

from __future__ import annotations

import base64
from collections import Counter

import httpx
import numpy as np
import pytest

from tests.api.edit_calls import coded
from tests.api.test_picture_trial import on_white
from tests.cell.local_service import LocalService
from tests.e2e.service import HEADERS
from tests.imaging.pictures import mask_file, pixels_of
from tests.imaging.random_pictures import picture

pytestmark = [
    pytest.mark.xdist_group("local"),
    pytest.mark.timeout(600),
    pytest.mark.slow,
]


def test_outside_a_mask_a_picture_looks_as_it_did(service: LocalService) -> None:
    counts: Counter[int] = Counter()
    for seed in range(100):
        one = picture(seed)
        height, width = (24, 40) if one.seen is None else one.seen.shape[:2]
        edited = np.zeros((height, width), np.bool_)
        edited[height // 3 : height // 2 + 1, width // 3 :] = True
        body = {
            "prompt": "a red circle",
            "image": coded(one.data),
            "mask": coded(mask_file(edited)),
            "num_inference_steps": 1,
            "response_format": "b64_json",
        }
        reply = httpx.post(f"{service.url}/v1/images/edits", json=body, headers=HEADERS, timeout=60)
        counts[reply.status_code] += 1
        if one.seen is None:
            assert reply.status_code == 400, (seed, reply.text)
            continue
        assert reply.status_code == 200, (seed, one.kind, reply.text)
        found = pixels_of(base64.b64decode(reply.json()["data"][0]["b64_json"]))
        if found.shape[:2] == (height, width):
            counts[0] += 1
            off = np.abs(found - on_white(one.seen))[~edited]
            assert off.max(initial=0) <= one.tolerance + 1, (seed, one.kind)
    assert counts[0] > 25
