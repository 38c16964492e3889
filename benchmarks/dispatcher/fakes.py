"""Replicas and clients that speak the real protocol to a dispatcher, and compute nothing.

What they themselves cost is measured apart, so that it can be taken off.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from benchmarks.settings import MODEL
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.jobs.service import JobService
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.jobs import Job
from ray_cluster.protocol.leases import Finished, Lease, Poll, Registration
from ray_cluster.requests import ImageRequest, ImageResult, ModelProfile, OutputSpec, Timing

NUM_STEPS = 20
# as a gateway waits
_WAIT_S = 5.0
_IMAGE = bytes(10_000)
_TIMING = Timing(queue_s=0.1, encode_s=0.1, denoise_s=0.1, decode_s=0.1)


@dataclass(slots=True)
class Meter:
    """CPU seconds that the fakes have used, and what they have seen so far.

    Attributes:
        given_up: how often the dispatcher took a replica for dead.
        depths: lengths of the queue, one after the other.
    """

    fakes_s: float = 0.0
    completed: int = 0
    polls: int = 0
    refused: int = 0
    given_up: int = 0
    depths: list[int] = field(default_factory=list)

    @contextmanager
    def fake(self) -> Iterator[None]:
        """Count a block without awaits as the fakes' own."""
        started_s = time.thread_time()
        try:
            yield
        finally:
            self.fakes_s += time.thread_time() - started_s


class FakeReplica:
    """One model replica that takes ``image_s`` for an image, whatever else it holds.

    As the real one does, it polls and reports at the same time, and names what it holds.
    """

    def __init__(
        self, dispatch: DispatchService, meter: Meter, *, number: int, rows: int, image_s: float
    ) -> None:
        self._dispatch = dispatch
        self._meter = meter
        self._id = f"replica-{number}"
        self._rows = rows
        self._image_s = image_s
        self._held: dict[str, Lease] = {}
        self._making: set[asyncio.Task[None]] = set()

    async def live(self) -> None:
        """Register, then make images until cancelled."""
        cost = StepCost(0.5 * self._image_s / NUM_STEPS + 1e-4, 1.0)
        registration = Registration(self._id, _profile(), self._rows, self._rows, cost)
        epoch = await self._dispatch.register(registration)
        try:
            while True:
                with self._meter.fake():
                    self._meter.polls += 1
                    named = dict.fromkeys(self._held, NUM_STEPS // 2)
                    poll = Poll(self._id, epoch, self._rows - len(named), named)
                reply = await self._dispatch.poll(poll)
                if not reply.known:
                    # on a machine that is too busy, a turn of the loop takes longer than a timeout
                    self._meter.given_up += 1
                    self._held.clear()
                    epoch = await self._dispatch.register(registration)
                    continue
                with self._meter.fake():
                    self._held.update({one.request.request_id: one for one in reply.leases})
                    if reply.leases:
                        making = asyncio.create_task(self._make(reply.leases))
                        self._making.add(making)
                        making.add_done_callback(self._making.discard)
        finally:
            for task in self._making:
                task.cancel()

    async def _make(self, leases: tuple[Lease, ...]) -> None:
        if self._image_s:
            await asyncio.sleep(self._image_s)
        with self._meter.fake():
            events = [Finished(one.request.request_id, one.fence, _result(one)) for one in leases]
            for lease in leases:
                self._held.pop(lease.request.request_id, None)
        await self._dispatch.report(self._id, events)


class AttachedClient:
    """A gateway's call for one image after the other, without an idempotency key."""

    def __init__(self, dispatch: DispatchService, meter: Meter, ids: Iterator[int]) -> None:
        self._dispatch = dispatch
        self._meter = meter
        self._ids = ids

    async def live(self) -> None:
        """Have images made until cancelled."""
        while True:
            with self._meter.fake():
                request = _request(next(self._ids), is_stored=False)
            reply = await self._dispatch.submit([request], "", 1.0)
            if not reply.offer.accepted:
                self._meter.refused += 1
                await asyncio.sleep(0.1)
                continue
            outcomes = reply.outcomes
            while not outcomes:
                outcomes = await self._dispatch.wait([request.request_id], _WAIT_S)
            self._meter.completed += 1


class DurableClient:
    """A gateway's calls for one job of one image after the other: created, waited for."""

    def __init__(self, jobs: JobService, meter: Meter, ids: Iterator[int]) -> None:
        self._jobs = jobs
        self._meter = meter
        self._ids = ids

    async def live(self) -> None:
        """Have jobs made until cancelled."""
        while True:
            with self._meter.fake():
                job = _job(next(self._ids))
            creation = await self._jobs.create_job(job)
            if creation.view is None:
                self._meter.refused += 1
                await asyncio.sleep(0.1)
                continue
            view = creation.view
            while view is not None and not view.job.is_final:
                view = await self._jobs.job(job.client, job.job_id, _WAIT_S)
            self._meter.completed += 1


def counter() -> Iterator[int]:
    """Return numbers for ids that were never used before."""
    return itertools.count()


def _request(number: int, *, is_stored: bool) -> ImageRequest:
    return ImageRequest(
        request_id=f"img-{number:032x}",
        model=MODEL,
        prompt="a large red circle in the center on a black background",
        width_px=64,
        height_px=64,
        num_steps=NUM_STEPS,
        guidance_scale=3.0,
        sampler="ddim",
        seed=number,
        output=OutputSpec(is_stored=is_stored),
    )


def _job(number: int) -> Job:
    return Job(
        job_id=f"job-{number:032x}",
        client="benchmark",
        requests=(_request(number, is_stored=True),),
        slo_s=60.0,
        created_s=time.time(),
        body_digest="0" * 64,
        images=(None,),
    )


def _result(lease: Lease) -> ImageResult:
    request = lease.request
    data = b"" if request.output.is_stored else _IMAGE
    return ImageResult(request.request_id, data, "png", _TIMING, len(_IMAGE))


def _profile() -> ModelProfile:
    return ModelProfile(
        model=MODEL,
        family="sd",
        size_multiple_px=8,
        min_px=32,
        max_px=256,
        default_width_px=64,
        default_height_px=64,
        default_num_steps=NUM_STEPS,
        default_guidance_scale=3.0,
        default_sampler="ddim",
        max_steps_by_sampler={"ddim": 100},
        max_prompt_tokens=77,
        created_s=0,
    )
