"""A discriminator's worker beside a real dispatch service: leases on images become confidences."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from ray_cluster.cell.worker import Worker
from ray_cluster.imaging.small_images import small_image
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Finished, Lease, Poll, Registration
from ray_cluster.protocol.outcomes import Completed
from ray_cluster.replica.score.skill import ScoreSkill
from ray_cluster.requests import (
    CascadeUse,
    ImageRequest,
    ImageResult,
    LightStage,
    SmallImage,
    Timing,
)
from tests.fakes import image_request, registration
from tests.replica.setup import Link, new_service, until

STAGE = LightStage("light", "judge", num_steps=2, guidance_scale=1.0, sampler="ddim")
BAD = "an image that cannot be scored"


class Brightness:
    """Answers how bright an image is; an image of one prompt breaks it.

    Attributes:
        batches: the prompts of every call.
        gate: holds calls up while it is cleared.
    """

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.gate.set()

    def score(self, prompts: Sequence[str], images: Sequence[SmallImage]) -> list[float]:
        self.batches.append(list(prompts))
        self.gate.wait(60.0)
        if BAD in prompts:
            raise ValueError("no score")
        return [sum(image.data) / len(image.data) / 255 for image in images]


def routed(number: int, prompt: str = "a red circle") -> ImageRequest:
    return image_request(f"r{number}", "heavy", prompt=prompt, cascade=CascadeUse("auto", STAGE))


class Judge(Worker):
    """A worker that scores images."""

    skill: ScoreSkill


@asynccontextmanager
async def judging(scorer: Brightness, link: Link) -> AsyncIterator[Judge]:
    cost = StepCost(0.001, 0.01)
    skill = ScoreSkill(
        Registration("s", None, 8, 4, cost, pool="judge", kind="score", served_as="judge"),
        scorer,
        link=link,
        clock=time.monotonic,
    )
    worker = Judge(skill)
    worker.start()
    try:
        yield worker
    finally:
        scorer.gate.set()
        link.fails = lambda _name, _side: False
        await worker.drain()
        await link.service.close()


async def light_images(link: Link, requests: Sequence[ImageRequest]) -> list[Lease]:
    """Have requests accepted and their light images made: the n-th of brightness n tenths."""
    service = link.service
    await service.register(registration("l", "light", max_in_flight=16))
    await service.register(registration("h", "heavy"))
    for one in requests:
        assert (await service.offer([one])).accepted
    leases: list[Lease] = []
    while len(leases) < len(requests):
        leases += (await service.poll(Poll("l", 1, 16 - len(leases)), 1.0)).leases
    events = []
    for number, lease in enumerate(leases):
        name = lease.request.request_id
        result = ImageResult(name, b"light", "png", Timing(), 5)
        pixels = np.full((8, 8, 3), round(255 * number / 10), np.uint8)
        events.append(Finished(name, lease.fence, result, small_image(pixels)))
    await service.report("l", events)
    return leases


async def ends(link: Link, requests: Sequence[ImageRequest]) -> dict[str, Completed]:
    found: dict[str, Completed] = {}
    while len(found) < len(requests):
        left = [one.request_id for one in requests if one.request_id not in found]
        for name, outcome in (await link.service.wait(left, 60.0)).items():
            assert isinstance(outcome, Completed)
            found[name] = outcome
    return found


async def test_images_are_scored_in_batches_and_one_that_fails_costs_no_other() -> None:
    scorer, link = Brightness(), Link(new_service())
    requests = [routed(n, BAD if n == 3 else "a red circle") for n in range(6)]
    async with judging(scorer, link) as worker:
        await until(lambda: link.epochs)
        scorer.gate.clear()
        leases = await light_images(link, requests)
        await until(lambda: scorer.batches)
        scorer.gate.set()
        found = await ends(link, requests)
        worker.check_alive()
    # without settings of the cascade, light images are published
    order = [lease.request.request_id for lease in leases]
    for number, name in enumerate(order):
        answer = found[name].cascade
        assert answer is not None
        is_scored = requests[int(name[1:])].prompt != BAD
        assert answer.confidence == (pytest.approx(number / 10, abs=0.01) if is_scored else None)
    assert max(map(len, scorer.batches)) > 1


@pytest.mark.parametrize("side", ["before", pytest.param("after", marks=pytest.mark.slow)])
async def test_scores_reach_the_dispatcher_though_calls_are_lost(side: str) -> None:
    scorer, link = Brightness(), Link(new_service())
    requests = [routed(n) for n in range(4)]
    async with judging(scorer, link):
        await until(lambda: link.epochs)
        link.fails = lambda name, at: (
            name in {"poll", "report"} and at == side and (link.num_lost < 6)
        )
        await light_images(link, requests)
        found = await ends(link, requests)
    assert link.num_lost
    assert len(found) == len(requests)


async def test_a_worker_that_leaves_tells_all_that_it_has_counted() -> None:
    link, requests = Link(new_service()), [routed(n) for n in range(3)]
    async with judging(Brightness(), link):
        await until(lambda: link.epochs)
        await light_images(link, requests)
        await ends(link, requests)
    last = link.last_poll["s"]
    told = {key[0]: value for one in last.metrics or () for key, value in one.samples.items()}
    assert (last.epoch, last.num_free, told["ray_cluster_confidence_count"]) == (0, 0, 3)


async def test_a_batch_that_hangs_is_seen_and_an_abort_is_heard_meanwhile() -> None:
    scorer, link = Brightness(), Link(new_service())
    async with judging(scorer, link) as worker:
        await until(lambda: link.epochs)
        scorer.gate.clear()
        await light_images(link, [routed(0)])
        await until(lambda: scorer.batches)
        worker.skill._max_silence_s = 0.0
        await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="a batch is scored for"):
            worker.check_alive()
        await link.service.abort(["r0"])
        await until(lambda: not link.last_poll["s"].steps_done_by_id, "the abort")
