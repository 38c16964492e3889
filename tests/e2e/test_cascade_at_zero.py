"""A cascade of which no model has a replica: its images are as good as ever, only later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.jobs import VICTIMS
from tests.e2e.service import CASCADE, HEADERS, LIGHT_POOL, Service, running

HEAVY = {**LIGHT_POOL, "name": "shapes-sd", "model": "shapes-sd", "num_cpus": 0.5}
STEPS = {"size": "64x64", "num_inference_steps": 20, "guidance_scale": 2.0}
THRESHOLD = 0.5
NUM_IMAGES = 4
PATIENCE_S = 240.0


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    pools = [
        one | {"min_replicas": 0, "max_replicas": 1}
        for one in (HEAVY | {"defaults": STEPS}, LIGHT_POOL)
    ]
    control = {"enabled": True, "period_s": 1.0, "dwell_s": 10.0}
    loras = {"num_stores": 0}
    with running(
        tmp_path, **{**CASCADE, "pools": pools, "control": control, "loras": loras}
    ) as one:
        yield one


def await_zero(service: Service) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while True:
        plan = httpx.get(f"{service.url}/v1/plan", headers=HEADERS, timeout=10).json()["latest"]
        pools = [] if plan is None else plan["pools"]
        ready = [one["num_ready"] for one in pools if one["pool"] != "shapes-judge"]
        if len(ready) == 2 and not any(ready):
            return
        assert time.monotonic() < end_s, "waited in vain until no replica is left"
        time.sleep(0.5)


def answers(service: Service) -> list[dict[str, Any]]:
    """Call for four images that the light model rarely makes well; return how each came about."""
    body = {
        "model": "shapes-auto",
        "prompt": "a red circle left of a green star",
        "n": NUM_IMAGES,
        "slo_s": 120,
    }
    url = f"{service.url}/v1/images/generations"
    reply = httpx.post(url, json=body, headers=HEADERS, timeout=150)
    assert reply.status_code == 200, reply.text
    return [one["cascade"] for one in reply.json()["data"]]


def check(found: list[dict[str, Any]]) -> None:
    assert len(found) == NUM_IMAGES
    for one in found:
        is_sure = one["confidence"] >= THRESHOLD
        assert (one["stage"], one["reason"]) == (
            ("light", "confident") if is_sure else ("heavy", "deferred")
        )


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_images_that_woke_both_models_are_made_anew_where_they_are_not_good(
    service: Service,
) -> None:
    await_zero(service)
    check(answers(service))
    # nor does it matter that the next controller has seen no calls
    await_zero(service)
    (controller,) = service.processes(VICTIMS["controller"], may_be_busy=True)
    controller.kill()
    check(answers(service))
