"""A group on Ray against kill -9 of its head, a rank and the dispatcher: nothing is lost."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.e2e.jobs import VICTIMS, create, ends_of, images_in
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import Service, running
from tests.e2e.settings import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = {"name": "shapes-sd3", "model": "shapes-sd3", "ranks": 4, "num_cpus": 0.25}
PROCESSES = {
    "head": "ray::ServeReplica:shapes-sd3:DiTGroup",
    "rank": "ray::_Rank.run",
    "dispatcher": VICTIMS["dispatcher"],
}
SEEDS = range(6)
FIELDS = {"model": "shapes-sd3", "size": "128x128", "num_inference_steps": 30}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    more = {"pools": [POOL], "cascades": [], "discriminators": []}
    with running(tmp_path_factory.mktemp("group"), **more) as service:
        yield service


@pytest.fixture(scope="module")
def unkilled(service: Service) -> dict[int, bytes]:
    return images_in(service, ends_of(service, [create(service, one, **FIELDS) for one in SEEDS]))


def ranks_of(service: Service) -> list[psutil.Process]:
    return service.processes(PROCESSES["rank"])


@pytest.mark.parametrize("victim", PROCESSES)
def test_jobs_outlive_it(service: Service, unkilled: dict[int, bytes], victim: str) -> None:
    chance = random.Random(victim)
    jobs = [create(service, one, **FIELDS) for one in SEEDS]
    time.sleep(chance.uniform(0.5, 3.0))
    before = ranks_of(service)
    assert len(before) == POOL["ranks"]
    chance.choice(service.processes(PROCESSES[victim])).kill()
    found = images_in(service, ends_of(service, jobs))
    assert max(pixels_differ(found[one], unkilled[one]) for one in SEEDS) <= 1
    # those of a dead head end by themselves, and so do the others of a dead rank
    wait_for(lambda: len(ranks_of(service)) == POOL["ranks"], "as many ranks as before")
    is_replaced = {one.pid for one in before}.isdisjoint(one.pid for one in ranks_of(service))
    assert is_replaced == (victim != "dispatcher")
