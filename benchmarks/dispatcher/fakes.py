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

from benchmarks.harness import MODEL
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.jobs.service import JobService
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.jobs import Job, JobView
from ray_cluster.protocol.leases import Finished, Lease, Poll, Registration
from ray_cluster.requests import ImageRequest, ImageResult, OutputSpec, Timing
from ray_cluster.simulator.cell.cell import profile_of

NUM_STEPS = 20
# as a gateway waits
_WAIT_S = 5.0
_RETRY_S = 0.1
_IMAGE = bytes(10_000)
_TIMING = Timing(queue_s=0.1, encode_s=0.1, denoise_s=0.1, decode_s=0.1)


@dataclass(slots=True)
class Meter:
    """CPU seconds that the fakes have used, and what they have seen so far."""

    fakes_s: float = 0.0
    completed: int = 0
    polls: int = 0
    refused: int = 0
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def fake(self) -> Iterator[None]:
        """Count a block without awaits as the fakes' own."""
        started_s = time.thread_time()
        try:
            yield
        finally:
            self.fakes_s += time.thread_time() - started_s


async def run_replica(
    dispatch: DispatchService, meter: Meter, *, number: int, slots: int, image_s: float
) -> None:
    """Register, then take ``image_s`` for each image until cancelled.

    As the real replica does, it polls and reports at the same time, and names what it has.
    """
    replica_id, held, tasks = f"replica-{number}", dict[str, Lease](), set[asyncio.Task[None]]()

    async def make(leases: tuple[Lease, ...]) -> None:
        if image_s:
            await asyncio.sleep(image_s)
        with meter.fake():
            events = [Finished(one.request.request_id, one.fence, _result(one)) for one in leases]
            for lease in leases:
                held.pop(lease.request.request_id, None)
        await dispatch.report(replica_id, events)

    cost = StepCost(0.5 * image_s / NUM_STEPS + 1e-4, 1.0)
    registration = Registration(replica_id, profile_of(MODEL), slots, slots, cost)
    epoch = await dispatch.register(registration)
    try:
        while True:
            with meter.fake():
                meter.polls += 1
                named = dict.fromkeys(held, NUM_STEPS // 2)
                poll = Poll(replica_id, epoch, slots - len(named), named)
            reply = await dispatch.poll(poll)
            if not reply.known:
                # on a machine that is too busy, a turn of the loop takes longer than a timeout
                held.clear()
                epoch = await dispatch.register(registration)
                continue
            with meter.fake():
                held.update({one.request.request_id: one for one in reply.leases})
                if reply.leases:
                    task = asyncio.create_task(make(reply.leases))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
    finally:
        for task in tasks:
            task.cancel()


async def call_attached(dispatch: DispatchService, meter: Meter) -> None:
    """Call for one image after the other, without an idempotency key, until cancelled."""
    while True:
        with meter.fake():
            request = _request(next(meter.numbers), is_stored=False)
        reply = await dispatch.submit([request], "", 1.0)
        if not reply.offer.accepted:
            meter.refused += 1
            await asyncio.sleep(_RETRY_S)
            continue
        outcomes = reply.outcomes
        while not outcomes:
            outcomes = await dispatch.wait([request.request_id], _WAIT_S)
        meter.completed += 1


async def create_jobs(jobs: JobService, meter: Meter) -> None:
    """Create one job of one image after the other, and wait for each, until cancelled."""
    while True:
        with meter.fake():
            job = _job(next(meter.numbers))
        creation = await jobs.create_job(job)
        if creation.view is None:
            meter.refused += 1
            await asyncio.sleep(_RETRY_S)
            continue
        view: JobView | None = creation.view
        while view is not None and not view.job.is_final:
            view = await jobs.job(job.client, job.job_id, _WAIT_S)
        meter.completed += 1


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
