"""What a kill costs in steps: images go on from the states that were in the store."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import pytest

from tests.e2e.jobs import (
    Metrics,
    create,
    ends_of,
    growth,
    images_in,
    scrape,
    states_of,
    steps_now,
    wait_for_replicas,
    wait_until_whole,
)
from tests.e2e.pixels import pixels_differ
from tests.e2e.service import Service, running

logger = logging.getLogger(__name__)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

JOBS = 4
STEPS = 120
# age of what is told of steps, in the service of the slow tests
PROGRESS_S = 0.02
# a state is in the store some steps after the one at which it was due: the writer's thread takes
# the due rows one by one, and shares two cores with the steps of both replicas and these tests
WRITE_STEPS = 10

Kill = Callable[[Service, Collection[str]], tuple[dict[str, int], dict[int, int]]]
"""Kills something under jobs; returns the steps told of them, by id, and the steps in the states
that are in the store then, by seed."""


@dataclass
class Losses:
    """What the kills so far have cost.

    Attributes:
        repeated: of each image that lost its replica, the steps that it had told of it and that
            its state did not contain. It had told the last time at most ``progress_s`` and a call
            before; with the steps since then, an image repeats so many more.
        intervals: steps between exports, as told right before each kill.
        num_without: images that lost their replica before their first state.
    """

    repeated: list[int] = field(default_factory=list)
    intervals: list[int] = field(default_factory=list)
    num_without: int = 0

    def __str__(self) -> str:
        average = sum(self.repeated) / len(self.repeated)
        return (
            f"{len(self.repeated)} images lost their replica ({self.num_without} before their "
            f"first state); of the steps it had told, repeated on average {average:.1f}, at most "
            f"{max(self.repeated)}; exports every {min(self.intervals)} to "
            f"{max(self.intervals)} steps"
        )


@dataclass(frozen=True)
class Unkilled:
    """A run in which nothing dies: its images by seed, and how long it took."""

    images: dict[int, bytes]
    took_s: float


def start_jobs(service: Service) -> dict[str, int]:
    # half of them might be made with fewer steps, which none needs: their terms travel all the way
    terms = ({}, {"min_inference_steps": STEPS // 2, "allow": ["steps"]})
    return {
        create(service, seed, num_inference_steps=STEPS, **terms[seed % 2]): seed
        for seed in range(JOBS)
    }


def run_unkilled(service: Service) -> Unkilled:
    wait_for_replicas(service)
    started_s = time.monotonic()
    jobs = ends_of(service, start_jobs(service))
    return Unkilled(images_in(service, jobs), time.monotonic() - started_s)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of its own, which may be killed as a whole."""
    folder = tmp_path_factory.mktemp("resuming")
    with running(folder, dispatch={"progress_s": PROGRESS_S}) as one:
        yield one


def kill_a_replica(
    service: Service, job_ids: Collection[str]
) -> tuple[dict[str, int], dict[int, int]]:
    random.choice(service.replicas()).kill()
    # what it told last is known, and nobody goes on with its images, until it counts as dead
    return steps_now(service, job_ids), states_of(service)


def kill_everything(
    service: Service, job_ids: Collection[str]
) -> tuple[dict[str, int], dict[int, int]]:
    told = steps_now(service, job_ids)
    service.kill_all()
    states = states_of(service)
    service.start()
    return told, states


def kill_once(
    service: Service, unkilled: Unkilled, kill: Kill, share: float, losses: Losses
) -> None:
    """Kill under jobs; every one is completed once, and goes on where its state says."""
    before = wait_for_replicas(service)
    seeds = start_jobs(service)
    # by steps, not by time: other tests may have made the run without kills slower than this one
    while sum(steps_now(service, seeds).values()) < share * STEPS * JOBS:
        time.sleep(0.05)
    interval = int(max(scrape(service).values("steps_between_exports")))
    told_by_id, states = kill(service, seeds)
    told = {seeds[job_id]: steps for job_id, steps in told_by_id.items()}
    jobs = ends_of(service, seeds)
    images = images_in(service, jobs)
    assert images.keys() == unkilled.images.keys()
    assert max(pixels_differ(images[seed], unkilled.images[seed]) for seed in images) <= 1
    wait_until_whole(service)
    after = scrape(service)
    lost = {job["data"][0]["seed"] for job in jobs if job["attempts"] > 1}
    if kill is kill_everything:
        # another dispatcher counts from zero
        before = Metrics("")
        lost = {seed for seed in told if told[seed] < STEPS}
    check_counts(before, after, {seed: states[seed] for seed in lost & states.keys()}, len(lost))
    assert interval > 0, "no states were exported"
    repeated = [max(0, told[seed] - states.get(seed, 0)) for seed in lost]
    losses.repeated += repeated
    losses.intervals.append(interval)
    losses.num_without += len(lost - states.keys())
    assert max(repeated, default=0) <= interval + WRITE_STEPS, (told, states, interval)


def check_counts(before: Metrics, after: Metrics, resumed: dict[int, int], num_lost: int) -> None:
    """What is told of the resumed images is exactly what their states contained."""

    assert growth(before, after, "resumed_images_total") == len(resumed)
    assert growth(before, after, "resumed_steps_total") == sum(resumed.values())
    if not before.samples:
        # some may have been done by the kill of what had been told of them
        assert len(resumed) <= growth(before, after, "images_total", event="restored") <= num_lost
        return
    assert growth(before, after, "images_total", event="requeued") == num_lost
    assert growth(before, after, "images_total", event="completed") == JOBS
    assert growth(before, after, "images_total", event="accepted") == JOBS


def rounds(service: Service, kill: Kill, count: int) -> None:
    chance, losses = random.Random(11), Losses()
    unkilled = run_unkilled(service)
    # a replica that is killed may have had nothing to do
    while len(losses.intervals) < count or not losses.repeated:
        assert len(losses.intervals) < count + 12
        kill_once(service, unkilled, kill, chance.uniform(0.2, 0.7), losses)
    logger.warning("%d times %s, run of %.1f s: %s", count, kill.__name__, unkilled.took_s, losses)
    # what ends with nothing resumed would not have tested anything
    assert losses.num_without < len(losses.repeated)


def test_images_of_a_killed_replica_go_on_from_their_states(service: Service) -> None:
    rounds(service, kill_a_replica, 1)


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(("kill", "count"), [(kill_a_replica, 12), (kill_everything, 4)])
def test_images_of_many_kills_go_on_from_their_states(
    killed: Service, kill: Kill, count: int
) -> None:
    rounds(killed, kill, count)
