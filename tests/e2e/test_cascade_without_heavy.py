"""A cascade whose heavy model is dead: what it publishes all the same is told as such."""

from __future__ import annotations

import logging
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_cluster.models.builtin import weights_folder
from tests.e2e.cascade_calls import CASCADE as NAME
from tests.e2e.jobs import VICTIMS, growth, kill_one, scrape
from tests.e2e.service import CASCADE, HEADERS, LIGHT_POOL, Service, running

logger = logging.getLogger(__name__)

PROMPT = "a red circle left of a green star above a large blue square on a white background"
NUM_CALLS, CLIENTS, SLO_S = 100, 8, 20.0
PATIENCE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(weights_folder() / "shapes-sd", tmp_path / "heavy"))


@pytest.fixture
def service(tmp_path: Path, folder: Path) -> Iterator[Service]:
    heavy = {**LIGHT_POOL, "name": "heavy", "served_as": "shapes-sd", "model": str(folder)}
    heavy["defaults"] = {"size": "64x64", "num_inference_steps": 20, "guidance_scale": 2.0}
    more: dict[str, Any] = {"pools": [heavy, LIGHT_POOL], "loras": {"num_stores": 0}}
    with running(tmp_path, **{**CASCADE, **more}) as one:
        yield one


def call(service: Service, seed: int, **fields: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": PROMPT, "seed": seed, "slo_s": SLO_S, **fields}
    return httpx.post(
        f"{service.url}/v1/images/generations", json=body, headers=HEADERS, timeout=PATIENCE_S
    )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hard_prompts_without_a_heavy_model_are_told_as_unfinished(
    service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(service, 0).json()["data"][0]["cascade"]["stage"] == "heavy"
    # what Serve starts in its place cannot load it
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    monkeypatch.setitem(VICTIMS, "heavy", "ray::ServeReplica:heavy:BaseModel")
    before = scrape(service)
    with ThreadPoolExecutor(CLIENTS) as pool:
        replies = [pool.submit(call, service, seed) for seed in range(NUM_CALLS)]
        kill_one(service, "heavy")()
        made = [one.result() for one in replies]
    assert {one.status_code for one in made} <= {200, 429}
    reasons = Counter(
        one.json()["data"][0]["cascade"]["reason"] for one in made if one.status_code == 200
    )
    logger.warning("replies of %d calls: %s", NUM_CALLS, reasons)
    unfinished = reasons["no_time"] + reasons["heavy_failed"]
    assert unfinished >= NUM_CALLS / 4, reasons
    after = scrape(service)
    told = growth(before, after, "deadlines_total", model=NAME, outcome="unfinished")
    assert told == unfinished
    met = growth(before, after, "deadlines_total", model=NAME, outcome="met")
    assert met <= reasons.total() - unfinished
    assert after.values("ready_replicas", model="shapes-sd") == [0.0]
    ready = httpx.get(f"{service.url}/readyz", timeout=10).json()
    assert any("shapes-sd" in one for one in ready.get("warnings", [ready])), ready


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_require_heavy_no_light_image_is_published(service: Service, folder: Path) -> None:
    (folder / "unet" / "diffusion_pytorch_model.safetensors").rename(folder / "away")
    process = service.processes("ray::ServeReplica:heavy:BaseModel")[0]
    process.kill()
    process.wait(30)
    with ThreadPoolExecutor(CLIENTS) as pool:
        calls = [
            pool.submit(call, service, seed, require="heavy", when_late="accept")
            for seed in range(CLIENTS)
        ]
        time.sleep(10)
        (folder / "away").rename(folder / "unet" / "diffusion_pytorch_model.safetensors")
        made = [one.result() for one in calls]
    for reply in made:
        if reply.status_code == 200:
            [image] = reply.json()["data"]
            assert image["cascade"]["stage"] == "heavy", image
        else:
            assert reply.status_code == 503, reply.text
