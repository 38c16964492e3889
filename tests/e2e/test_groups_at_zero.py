"""A controller that scales a group to none and back: nothing of it is left, and it serves again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.jobs import create, growth, images_of, scrape, steps_now
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import Service, images, post, running
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
    "max_replicas": 1,
}
LONG = {"model": "shapes-sd3", "size": "128x128", "num_inference_steps": 60}
SEEDS = range(2)
CONTROL = {"enabled": True, "period_s": 1.0, "dwell_s": 5.0}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    more: dict[str, Any] = {"pools": [POOL], "cascades": [], "discriminators": []}
    more |= {"loras": {"num_stores": 0}, "control": CONTROL}
    with running(tmp_path, **more) as service:
        yield service


def placement_groups(service: Service) -> Counter[str]:
    """Return how many placement groups Ray has, by state, without those that are gone."""
    url = f"{service.dashboard_url}/api/v0/placement_groups"
    found = httpx.get(url, timeout=10).json()["data"]["result"]["result"]
    return Counter(one["state"] for one in found if one["state"] != "REMOVED")


def num_processes(service: Service) -> tuple[int, int]:
    heads, ranks = (service.processes(PROCESSES[one], may_be_busy=True) for one in ("head", "rank"))
    return len(heads), len(ranks)


def wait_for_none(service: Service) -> None:
    wait_for(lambda: num_processes(service) == (0, 0), "no head and no rank is left")
    wait_for(lambda: not placement_groups(service), "what they reserved is free")


def check_one(service: Service) -> None:
    assert num_processes(service) == (1, NUM_RANKS)
    assert placement_groups(service) == {"CREATED": 1}


def made(service: Service) -> bytes:
    [found] = images(post(service, seed=3, model="shapes-sd3", num_inference_steps=4, slo_s=120))
    return found


def scale_by_hand(service: Service, count: int) -> None:
    path = "api/v1/applications/shapes-sd3/deployments/DiTGroup/scale"
    body = {"target_num_replicas": count}
    reply = httpx.post(f"{service.dashboard_url}/{path}", json=body, timeout=10)
    assert reply.status_code == 200, reply.text


def test_a_group_goes_to_none_and_comes_back_as_often_as_wanted(service: Service) -> None:
    first = made(service)
    check_one(service)
    wait_for_none(service)
    assert pixels_differ(made(service), first) <= 1
    check_one(service)
    # so do images that lose it in the middle
    jobs = [create(service, seed, **LONG) for seed in SEEDS]
    unmoved = images_of(service, jobs)
    before = scrape(service)
    jobs = [create(service, seed, **LONG) for seed in SEEDS]
    wait_for(lambda: all(steps_now(service, jobs).values()), "both step")
    scale_by_hand(service, 0)
    found = images_of(service, jobs)
    assert all(pixels_differ(found[seed], unmoved[seed]) <= 1 for seed in SEEDS)
    assert growth(before, scrape(service), "images_total", event="requeued") == len(SEEDS)
    check_one(service)
    wait_for_none(service)
