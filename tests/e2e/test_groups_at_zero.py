"""A controller that scales a group to none and back: nothing of it is left, and it serves again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.pixels import pixels_differ
from tests.e2e.service import HEADERS, Service, images, post, running
from tests.e2e.settings import wait_for
from tests.e2e.test_groups_killed import PROCESSES

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_RANKS = 2
POOL = {
    "name": "shapes-sd3",
    "model": "shapes-sd3",
    "ranks": NUM_RANKS,
    "num_cpus": 0.25,
    "min_replicas": 0,
    "max_replicas": 2,
}
CONTROL = {"enabled": True, "period_s": 1.0, "dwell_s": 5.0}


@pytest.fixture(params=["endpoint", "policy"])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    more: dict[str, Any] = {"pools": [POOL], "cascades": [], "discriminators": []}
    more |= {"loras": {"num_stores": 0}, "control": CONTROL | {"scaling": request.param}}
    with running(tmp_path, **more) as service:
        yield service


def placement_groups(service: Service) -> Counter[str]:
    """Return how many placement groups Ray has, by state, without those that are gone."""
    url = f"{service.dashboard_url}/api/v0/placement_groups"
    found = httpx.get(url, timeout=10).json()["data"]["result"]["result"]
    return Counter(one["state"] for one in found if one["state"] != "REMOVED")


def num_processes(service: Service) -> tuple[int, int]:
    heads, ranks = (service.processes(PROCESSES[one]) for one in ("head", "rank"))
    return len(heads), len(ranks)


def made(service: Service) -> bytes:
    [found] = images(post(service, seed=3, model="shapes-sd3", num_inference_steps=4, slo_s=120))
    return found


def test_a_group_goes_to_none_and_comes_back_as_often_as_wanted(service: Service) -> None:
    first = made(service)
    for _ in range(2):
        wait_for(lambda: num_processes(service) == (0, 0), "no head and no rank is left")
        wait_for(lambda: not placement_groups(service), "what they reserved is free")
        began_s = time.monotonic()
        assert pixels_differ(made(service), first) <= 1
        print("back in", time.monotonic()-began_s)
        assert num_processes(service) == (1, NUM_RANKS)
        assert placement_groups(service) == {"CREATED": 1}
    plan = httpx.get(f"{service.url}/v1/plan", headers=HEADERS, timeout=10).json()
    changes = Counter(change for one in plan["history"] for change in one["actions"])
    print(changes)
