"""A cascade against kill -9 of everything that takes part in it.

What is right is known: the light and the heavy model's own images for a seed, and the discriminator
answers the same for the same image.
"""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from tests.e2e.cascade_calls import CASCADE, answers_of, images_of_stages, prompt
from tests.e2e.jobs import create, ends_of, images_in, kill_one, wait_until_whole
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import Service

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

JOBS = 8


@pytest.fixture(scope="module")
def images(service: Service) -> dict[tuple[str, int], bytes]:
    return images_of_stages(service, JOBS)


@pytest.fixture(scope="module")
def answers(service: Service, images: dict[tuple[str, int], bytes]) -> dict[int, dict[str, Any]]:
    return answers_of(service, images)


def kill_and_check(
    service: Service,
    images: dict[tuple[str, int], bytes],
    answers: dict[int, dict[str, Any]],
    victim: str,
    delay_s: float,
) -> None:
    """Have jobs made, kill in between: each ends once, and its image is that of its stage."""
    jobs = [
        create(service, seed, model=CASCADE, prompt=prompt(seed), slo_s=300) for seed in range(JOBS)
    ]
    time.sleep(delay_s)
    kill_one(service, victim)()
    ended = ends_of(service, jobs)
    found = images_in(service, ended)
    assert found.keys() == set(range(JOBS))
    for job in ended:
        [image] = job["data"]
        seed, answer = image["seed"], image["cascade"]
        if answer is None:
            # a dispatcher died between the image and its note
            assert victim == "dispatcher"
            stage = answers[seed]["stage"]
        else:
            stage = answer["stage"]
            if answer["reason"] in {"confident", "deferred"}:
                assert stage == answers[seed]["stage"]
                assert answer["confidence"] == pytest.approx(answers[seed]["confidence"], abs=0.02)
            else:
                # on a busy machine any process may be silent for so long that it counts as dead
                assert (answer["reason"], stage) == ("scorer_away", "light")
        assert pixels_differ(found[seed], images[stage, seed]) <= 1
    wait_until_whole(service)


def test_calls_get_the_images_of_their_stages(service: Service) -> None:
    answers = answers_of(service, images_of_stages(service, 2))
    assert {one["reason"] for one in answers.values()} <= {"confident", "deferred"}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["discriminator", "light", "replica", "dispatcher"])
def test_every_job_ends_once_with_the_right_image_whatever_is_killed(
    service: Service,
    images: dict[tuple[str, int], bytes],
    answers: dict[int, dict[str, Any]],
    victim: str,
) -> None:
    kill_and_check(service, images, answers, victim, delay_s=0.3)
    # nothing is left of what was not published
    left = [path.name for path in (service.folder / "store" / "results").glob("*.candidate")]
    assert not left


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("victim", ["discriminator", "light", "replica", "dispatcher"])
def test_jobs_outlive_ten_kills(
    service: Service,
    images: dict[tuple[str, int], bytes],
    answers: dict[int, dict[str, Any]],
    victim: str,
) -> None:
    rng = random.Random(7)
    for _ in range(10):
        kill_and_check(service, images, answers, victim, rng.uniform(0.0, 1.5))
