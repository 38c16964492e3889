"""Images that are enlarged at last, against kill -9 of everything that takes part in that.

What is right is known: Pillow's enlargement of the image without it, of the model that answers.
"""

from __future__ import annotations

import base64
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.cascade_calls import CASCADE, HEAVY, answers_of, images_of_stages, prompt
from tests.e2e.jobs import (
    VICTIMS,
    create,
    ends_of,
    images_in,
    kill_one,
    scrape,
    wait_until_whole,
)
from tests.e2e.pixels import enlargement, pixels_differ
from tests.e2e.service import UPSCALERS, Service, post, running
from tests.e2e.settings import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

JOBS, CALLS = 8, 4
FACTOR = 2
KILLED = ["upscaler", "replica", "light", "gateway", "dispatcher"]
# what a call may get besides its image: Serve's proxy itself answers for a dead gateway
ERRORS = {"gateway": {500, 503}, "dispatcher": {503}}
# an image of another batch differs by 1, and Lanczos weights add up to 1.7 with their signs dropped
TOLERANCE = 2

Images = dict[tuple[str, int], bytes]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("upscaling"), **UPSCALERS) as service:
        yield service


@pytest.fixture(scope="module")
def bare(service: Service) -> Images:
    """Each model's own images, by stage and seed, as they are without enlargement."""
    return images_of_stages(service, JOBS)


@pytest.fixture(scope="module")
def images(bare: Images) -> Images:
    """Their enlargements."""
    return {key: enlargement(data, FACTOR) for key, data in bare.items()}


@pytest.fixture(scope="module")
def stages(service: Service, bare: Images) -> dict[int, str]:
    """The stage whose image the cascade answers with, by seed."""
    return {seed: one["stage"] for seed, one in answers_of(service, bare).items()}


def model_of(seed: int) -> str:
    """Return the cascade and its heavy model in turn; seeds of both have easy and hard prompts."""
    return (CASCADE, HEAVY)[seed // 2 % 2]


def fields_of(seed: int) -> dict[str, Any]:
    return {"model": model_of(seed), "prompt": prompt(seed), "seed": seed, "upscale": FACTOR}


def attached(service: Service, seed: int) -> tuple[int, dict[str, Any]]:
    """Call for an image; return the status, and what came."""
    reply = post(service, **fields_of(seed), slo_s=300)
    is_json = reply.headers.get("content-type", "").startswith("application/json")
    return reply.status_code, reply.json() if is_json else {}


def check(data: bytes, seed: int, stage: str, images: Images) -> None:
    assert pixels_differ(data, images[stage, seed]) <= TOLERANCE, (seed, stage)


def is_idle(service: Service, jobs: Iterable[str] | None = None) -> bool:
    """Whether nothing waits, is leased, or is left in the store for a later stage.

    Args:
        jobs: ids of the images whose leftovers count; None for every image.
    """
    found = scrape(service)
    names = ("waiting_images", "leased_images", "open_jobs")
    return not any(found.total(name) for name in names) and not candidates_in(service, jobs)


def candidates_in(service: Service, jobs: Iterable[str] | None = None) -> list[str]:
    results = service.folder / "store" / "results"
    names = [path.name for path in results.glob("*.candidate*")]
    return [one for one in names if jobs is None or one.partition(".")[0] in jobs]


def expected_stage(seed: int, image: dict[str, Any], stages: dict[int, str], victim: str) -> str:
    """Return the stage whose image is the right one, by what a reply says of the cascade."""
    answer = image.get("cascade")
    if model_of(seed) == HEAVY:
        return "heavy"
    if answer is None:
        # a dispatcher died between the image and its note
        assert victim == "dispatcher"
        return stages[seed]
    if answer["reason"] in {"confident", "deferred"}:
        assert answer["stage"] == stages[seed]
    else:
        # on a busy machine any process may be silent for so long that it counts as dead
        assert (answer["reason"], answer["stage"]) == ("scorer_away", "light")
    return str(answer["stage"])


def while_enlarging(service: Service, kill: Callable[[], None]) -> None:
    """Kill when upscalers have images, which they go on with, if they live, only after that."""
    for _ in range(20):
        with frozen(service.processes(VICTIMS["upscaler"])):
            # silent ones count as dead soon
            patient_until_s = time.monotonic() + 3.0
            while time.monotonic() < patient_until_s:
                if scrape(service).total("leased_images", model="upscale:big"):
                    kill()
                    return
        time.sleep(0.5)
    pytest.fail("no image comes to an upscaler")


@contextmanager
def frozen(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Stop processes for the time of a block; those that live go on after it."""
    for one in processes:
        one.suspend()
    try:
        yield
    finally:
        for one in processes:
            with suppress(psutil.NoSuchProcess):
                one.resume()


def kill_and_check(
    service: Service,
    images: Images,
    stages: dict[int, str],
    victim: str,
    delay_s: float | None = None,
) -> None:
    """Have jobs and calls made, kill in between: each ends once, with the right image.

    Args:
        delay_s: from the last job to the kill; None to kill while images are being enlarged.
    """
    kill = kill_one(service, victim)
    with ThreadPoolExecutor(CALLS) as pool:
        calls = [pool.submit(attached, service, seed) for seed in range(CALLS)]
        jobs = [create(service, **fields_of(seed), slo_s=300) for seed in range(JOBS)]
        if delay_s is None:
            while_enlarging(service, kill)
        else:
            time.sleep(delay_s)
            kill()
        ended = ends_of(service, jobs)
        replies = [one.result() for one in calls]
    found = images_in(service, ended)
    assert found.keys() == set(range(JOBS))
    for job in ended:
        [image] = job["data"]
        seed = image["seed"]
        check(found[seed], seed, expected_stage(seed, image, stages, victim), images)
    for seed, (status, body) in enumerate(replies):
        if status != httpx.codes.OK:
            assert status in ERRORS.get(victim, ()), (victim, status, body)
            continue
        [image] = body["data"]
        data = base64.b64decode(image["b64_json"])
        check(data, seed, expected_stage(seed, image, stages, victim), images)
    wait_until_whole(service, upscaler=2)
    # of attached calls nobody knows after a dispatcher's death: the sweep deletes what they left
    ids = {
        image["url"].rpartition("/")[2].partition(".")[0] for job in ended for image in job["data"]
    }
    known = ids if victim == "dispatcher" else None
    wait_for(lambda: is_idle(service, known), f"an idle service after the death of a {victim}")


@pytest.mark.parametrize("victim", KILLED)
def test_every_enlarged_image_is_right_whatever_is_killed(
    service: Service, images: Images, stages: dict[int, str], victim: str
) -> None:
    kill_and_check(service, images, stages, victim)


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("victim", KILLED)
def test_enlarged_images_outlive_five_kills(
    service: Service, images: Images, stages: dict[int, str], victim: str
) -> None:
    rng = random.Random(7)
    for _ in range(5):
        kill_and_check(service, images, stages, victim, rng.uniform(0.0, 1.5))
