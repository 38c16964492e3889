"""A group of four ranks in a running service: its images, its replies, and ranks that die."""

from __future__ import annotations

import base64
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from tests.cell.local_service import LocalService, running_locally
from tests.e2e.edit_templates import mask_png, pixels_of
from tests.e2e.service import HEADERS
from tests.engine.harness import PIXEL_TOLERANCE

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("local"),
    pytest.mark.timeout(1500),
]

PROMPT = "a large blue star at the top left on a white background"
SIZES = ("64x64", "128x128", "96x64", "64x128")
NUM_KILLS = 20


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    """A group, and the same model on one rank."""
    pools = [
        {"name": "group", "model": "shapes-sd3", "ranks": 4},
        {"name": "one", "model": "shapes-sd3"},
    ]
    more: dict[str, Any] = {"pools": pools, "cascades": [], "discriminators": []}
    with running_locally(tmp_path_factory.mktemp("groups"), **more) as service:
        yield service


def send(service: LocalService, path: str, **fields: Any) -> dict[str, Any]:
    url = f"{service.url}/v1/images/{path}"
    reply = httpx.post(url, json={"prompt": PROMPT} | fields, headers=HEADERS, timeout=300)
    assert reply.status_code == 200, reply.text
    [found] = reply.json()["data"]
    return dict(found)


def made(service: LocalService, number: int, model: str = "group", **fields: Any) -> dict[str, Any]:
    size = SIZES[number % len(SIZES)]
    return send(service, "generations", model=model, size=size, seed=number, **fields)


def pixels(found: dict[str, Any]) -> np.ndarray[Any, Any]:
    return pixels_of(base64.b64decode(found["b64_json"])).astype(int)


def differ_by(one: dict[str, Any], other: dict[str, Any]) -> int:
    return int(np.abs(pixels(one) - pixels(other)).max())


def all_of(service: LocalService, numbers: range, model: str = "group") -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(lambda one: made(service, one, model), numbers))


def rank_pids() -> list[int]:
    return [
        one.pid
        for one in psutil.Process().children(recursive=True)
        if "ray_cluster.replica.group.rank" in " ".join(one.cmdline())
    ]


def test_images_are_those_of_one_rank_and_say_their_degrees(groups: LocalService) -> None:
    found, expected = all_of(groups, range(8)), all_of(groups, range(8), "one")
    assert max(map(differ_by, found, expected)) <= PIXEL_TOLERANCE
    degrees = [{int(k): v for k, v in one["steps_by_degree"].items()} for one in found]
    assert all(sum(one.values()) == found[0]["num_inference_steps"] for one in degrees)
    assert {degree for one in degrees for degree in one} <= {1, 2, 4}
    assert "steps_by_degree" not in expected[0]
    alone = made(groups, 1, guidance_scale=1.0)
    assert differ_by(alone, made(groups, 1, "one", guidance_scale=1.0)) <= PIXEL_TOLERANCE


def test_an_edit_spares_what_its_mask_does(groups: LocalService) -> None:
    template = base64.b64decode(made(groups, 0, "one")["b64_json"])
    mask = np.zeros((64, 64), bool)
    mask[8:40, 8:40] = True
    images = {"image": template, "mask": mask_png(mask)}
    fields: dict[str, Any] = {k: base64.b64encode(v).decode() for k, v in images.items()}
    found, expected = (
        send(groups, "edits", model=one, seed=3, **fields) for one in ("group", "one")
    )
    assert differ_by(found, expected) <= PIXEL_TOLERANCE
    spared = pixels(found)[~mask]
    assert (spared == pixels_of(template).astype(int)[~mask]).all()


def test_a_job_says_degrees_and_a_cancelled_one_frees_its_ranks(groups: LocalService) -> None:
    body = {"model": "group", "prompt": PROMPT, "size": "128x128", "num_inference_steps": 100}
    reply = httpx.post(f"{groups.url}/v1/jobs", json=body | {"n": 4}, headers=HEADERS)
    url = f"{groups.url}/v1/jobs/{reply.json()['id']}"
    while httpx.get(url, headers=HEADERS).json()["state"] == "queued":
        time.sleep(0.05)
    assert httpx.delete(url, headers=HEADERS).status_code == 200
    began_s = time.monotonic()
    made(groups, 0)
    assert time.monotonic() - began_s < 30
    done = httpx.post(
        f"{groups.url}/v1/jobs", json=body | {"num_inference_steps": 5}, headers=HEADERS
    ).json()
    url = f"{groups.url}/v1/jobs/{done['id']}"
    while (job := httpx.get(url, headers=HEADERS).json())["finished"] is None:
        time.sleep(0.05)
    assert sum(job["data"][0]["steps_by_degree"].values()) == 5


@pytest.mark.parametrize("name", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_dies_or_is_silent_costs_no_image(groups: LocalService, name: str) -> None:
    expected, chance, seconds = all_of(groups, range(6)), random.Random(0), list[float]()
    for _ in range(1 if name == "SIGSTOP" else NUM_KILLS):
        with ThreadPoolExecutor(6) as pool:
            calls = [pool.submit(made, groups, one) for one in range(6)]
            time.sleep(chance.uniform(0.1, 2.0))
            before = rank_pids()
            os.kill(chance.choice(before), getattr(signal, name))
            began_s = time.monotonic()
            found = [one.result() for one in calls]
        seconds.append(time.monotonic() - began_s)
        assert max(map(differ_by, found, expected)) <= PIXEL_TOLERANCE
        assert set(before).isdisjoint(rank_pids()), "all ranks are started again"
    logger.warning("%s: all answered %s s after it", name, [round(one, 1) for one in seconds])
