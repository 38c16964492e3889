"""Many who follow a job cost as much as one, and hear of every change."""

from __future__ import annotations

import asyncio
import time

from ray_cluster.jobs.open_job import OpenJob
from ray_cluster.jobs.watchers import JobWatchers
from tests.jobs.cell import job


class Looks:
    """What can be seen of jobs, and how often somebody looked."""

    def __init__(self) -> None:
        self.version = "1"
        self.count = 0

    def __call__(self, _job: OpenJob) -> str:
        self.count += 1
        return self.version


async def test_a_job_is_looked_at_as_often_for_many_as_for_one() -> None:
    looks = Looks()
    watchers, one = JobWatchers(looks), OpenJob(job("j"), {})
    waiting = [asyncio.create_task(watchers.wait(one, "1", 0.55)) for _ in range(300)]
    await asyncio.sleep(0)
    looks.count = 0
    await asyncio.gather(*waiting)
    assert looks.count <= 6
    # and not at all when nobody follows it
    looks.count = 0
    await asyncio.sleep(0.3)
    assert looks.count <= 1


async def test_all_hear_of_a_change_and_of_one_that_has_been() -> None:
    looks = Looks()
    watchers, one = JobWatchers(looks), OpenJob(job("j"), {})
    waiting = [asyncio.create_task(watchers.wait(one, "1", 10.0)) for _ in range(3)]
    await asyncio.sleep(0.15)
    assert not any(task.done() for task in waiting)
    looks.version = "2"
    async with asyncio.timeout(1):
        await asyncio.gather(*waiting)
        await watchers.wait(one, "1", 10.0)


async def test_what_is_told_is_heard_at_once() -> None:
    looks = Looks()
    watchers, one = JobWatchers(looks), OpenJob(job("j"), {})
    waiting = asyncio.create_task(watchers.wait(one, "1", 10.0))
    await asyncio.sleep(0)
    looks.version = "2"
    started_s = time.monotonic()
    watchers.look(one)
    await waiting
    assert time.monotonic() - started_s < 0.05


async def test_who_leaves_or_waits_too_long_leaves_nothing() -> None:
    watchers, one = JobWatchers(Looks()), OpenJob(job("j"), {})
    gone = asyncio.create_task(watchers.wait(one, "1", 10.0))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    await watchers.wait(one, "1", 0.01)
    assert not watchers._watched
    watchers.close()
