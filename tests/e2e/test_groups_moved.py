"""A group and a pool of one rank under one name, on Ray: what one leaves, the other ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.jobs import create, ends_of, growth, images_in, scrape, steps_now
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import Service, running
from tests.e2e.settings import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 100
# images that a worker has, and steps beside each other
HELD = 2
POOL = {
    "model": "shapes-sd3",
    "served_as": "both",
    "num_cpus": 0.25,
    "max_batch": HELD,
    "max_in_flight": HELD,
}
POOLS = [{"name": "group", "ranks": 2, **POOL}, {"name": "one", **POOL}]
WORKERS = {
    "group": "ray::ServeReplica:group:DiTGroup",
    "one": "ray::ServeReplica:one:BaseModel",
}
FIELDS = {"model": "both", "size": "128x128", "num_inference_steps": NUM_STEPS}
SEEDS = range(2 * HELD)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    more: dict[str, Any] = {"pools": POOLS, "cascades": [], "discriminators": []}
    with running(tmp_path_factory.mktemp("both"), **more, loras={"num_stores": 0}) as service:
        yield service


@pytest.fixture(scope="module")
def unmoved(service: Service) -> dict[int, bytes]:
    return images_in(service, ends_of(service, [create(service, one, **FIELDS) for one in SEEDS]))


@pytest.mark.parametrize(
    ("pool", "name"), [("group", "SIGTERM"), ("group", "SIGKILL"), ("one", "SIGKILL")]
)
def test_what_a_worker_leaves_goes_on_on_the_other(
    service: Service, unmoved: dict[int, bytes], pool: str, name: str
) -> None:
    wait_for(lambda: len(scrape(service).values("free_places", model="both")) == 2, "both are here")
    before = scrape(service)
    jobs = [create(service, seed, **FIELDS) for seed in SEEDS]
    wait_for(lambda: all(one > 8 for one in steps_now(service, jobs).values()), "all step")
    (victim,) = service.processes(WORKERS[pool], may_be_busy=True)
    victim.send_signal(getattr(signal, name))
    ended = ends_of(service, jobs)
    found, after = images_in(service, ended), scrape(service)
    assert max(pixels_differ(found[seed], unmoved[seed]) for seed in SEEDS) <= 1
    assert growth(before, after, "images_total", event="requeued") == HELD
    on_group = [sum((one["data"][0]["steps_by_degree"] or {}).values()) for one in ended]
    assert any(0 < one < NUM_STEPS for one in on_group), on_group
