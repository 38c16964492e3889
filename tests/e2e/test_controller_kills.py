"""The controller reshapes a service while each kind of its processes is killed: all jobs end once.

What is right is known: each model's own image for a seed, and diffusers' with a ControlNet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.e2e.controlled import base64_of, hinted, truth
from tests.e2e.edit_templates import pixels_of
from tests.e2e.jobs import create, ends_of, images_in, kill_one, look, scrape, served_replicas
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import CASCADE, LIGHT_POOL, Service, running
from tests.e2e.settings import Document, wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

HEAVY, LIGHT = "shapes-sd", "shapes-sd-light"
# a kill each while replicas come, and while they go
VICTIMS = ("replica", "light", "discriminator", "ControlNet", "dispatcher", "gateway", "controller")
JOBS, STEERED = 6, 3
PROMPT = "a red circle left of a green star above a large blue square on a white background"
PERIOD_S = 1.0

POOL = {
    "name": HEAVY,
    "model": HEAVY,
    "num_cpus": 0.25,
    "max_batch": 8,
    "min_px": 32,
    "max_px": 128,
    "min_replicas": 1,
    "max_replicas": 1,
    "defaults": {
        "size": "64x64",
        "num_inference_steps": 20,
        "guidance_scale": 2.0,
        "sampler": "ddim",
    },
}
SECTIONS: dict[str, Any] = {
    "pools": [POOL, LIGHT_POOL | {"min_replicas": 1, "max_replicas": 1}],
    "controlnets": [
        {"name": "edges", "model": "shapes-sd-edges", "bases": [HEAVY], "num_cpus": 0.25}
    ],
    "discriminators": CASCADE["discriminators"],
    # many images are deferred
    "cascades": [one | {"threshold": 0.9} for one in CASCADE["cascades"]],
    "loras": {"num_stores": 0},
    "control": {"enabled": True, "period_s": PERIOD_S, "dwell_s": 2.0},
}


@pytest.fixture(scope="module")
def reshaped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("reshaped"), **SECTIONS) as one:
        wait_for(lambda: num_live(one) == 1, "the model")
        yield one


@pytest.fixture(scope="module")
def images(reshaped: Service) -> dict[tuple[str, int], bytes]:
    """Each model's own images, by stage and seed."""
    jobs = {
        stage: [create(reshaped, seed, model=model, prompt=PROMPT) for seed in range(JOBS)]
        for stage, model in (("light", LIGHT), ("heavy", HEAVY))
    }
    return {
        (stage, seed): image
        for stage, some in jobs.items()
        for seed, image in images_in(reshaped, ends_of(reshaped, some)).items()
    }


def num_live(service: Service) -> int:
    return served_replicas(scrape(service))


def bound(service: Service, count: int) -> None:
    """Have the heavy model's replicas be so many."""
    own = {"min_replicas": count, "max_replicas": count, "replicas": count}
    Document(service).edit(lambda content: content["pools"][0].update(own))


def is_planned(service: Service, count: int) -> bool:
    found = httpx.get(f"{service.dashboard_url}/api/serve/applications/", timeout=10).json()
    [own] = found["applications"][HEAVY]["deployments"].values()
    return bool(own["target_num_replicas"] == count)


def is_applied(service: Service) -> bool:
    reply = look(service, "/v1/plan")
    return reply is not None and reply.json()["state"] == "applied"


def steered_jobs(service: Service) -> list[str]:
    texts, maps = hinted(STEERED)
    return [
        create(
            service,
            seed,
            model=HEAVY,
            prompt=texts[seed],
            controlnets=[{"name": "edges", "image": base64_of(maps["edges"][seed])}],
        )
        for seed in range(STEERED)
    ]


def check(
    service: Service,
    images: dict[tuple[str, int], bytes],
    routed: list[str],
    steered: list[str],
) -> None:
    """Check that each job ends with one image, that of the model that made it."""
    ended = ends_of(service, routed)
    found = images_in(service, ended)
    assert found.keys() == set(range(JOBS))
    for job in ended:
        [image] = job["data"]
        seed, answer = image["seed"], image["cascade"]
        # None: a dispatcher died between the image and its note
        stages = ["light", "heavy"] if answer is None else [answer["stage"]]
        assert min(pixels_differ(found[seed], images[stage, seed]) for stage in stages) <= 1
    texts, maps = hinted(STEERED)
    found = images_in(service, ends_of(service, steered))
    assert found.keys() == set(range(STEERED))
    for seed, image in found.items():
        expected = truth(texts[seed], seed, {"edges": maps["edges"][seed]})
        assert np.abs(pixels_of(image) - expected).max() <= 1


# the count changes from test to test
@pytest.mark.parametrize("count", [2, 1])
@pytest.mark.parametrize("victim", VICTIMS)
def test_every_job_ends_once_though_a_process_dies_while_replicas_come_and_go(
    reshaped: Service, images: dict[tuple[str, int], bytes], victim: str, count: int
) -> None:
    routed = [create(reshaped, seed, model="shapes-auto", prompt=PROMPT) for seed in range(JOBS)]
    steered = steered_jobs(reshaped)
    bound(reshaped, count)
    wait_for(lambda: is_planned(reshaped, count), f"{count} are planned")
    kill_one(reshaped, victim)()
    check(reshaped, images, routed, steered)
    wait_for(
        lambda: num_live(reshaped) == count and is_applied(reshaped),
        f"{count} replicas, and a plan that is applied",
    )
