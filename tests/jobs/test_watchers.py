"""Many who follow a job cost as much as one, and hear of every change."""

from __future__ import annotations

import asyncio

from ray_cluster.jobs.open_job import OpenJob
from ray_cluster.jobs.watchers import JobWatchers
from ray_cluster.protocol.jobs import JobView
from tests.fakes import run_virtually
from tests.jobs.jobs_cell import job


class Looks:
    """What can be seen of jobs, and how often somebody looked."""

    def __init__(self) -> None:
        self.version = "1"
        self.count = self.num_views = 0

    def __call__(self, _job: OpenJob) -> str:
        self.count += 1
        return self.version

    def view(self, one: OpenJob) -> JobView:
        """Show a job; each view is another one."""
        self.num_views += 1
        return JobView(one.job, num_made=self.num_views)


def watchers_of(looks: Looks) -> JobWatchers:
    return JobWatchers(looks, looks.view)


def test_a_job_is_checked_as_often_for_many_watchers_as_for_one() -> None:
    async def main() -> None:
        looks = Looks()
        watchers, one = watchers_of(looks), OpenJob(job("j"))
        waiting = [asyncio.create_task(watchers.wait(one, "1", 0.55)) for _ in range(300)]
        await asyncio.sleep(0)
        looks.count = 0
        await asyncio.gather(*waiting)
        assert looks.count <= 6
        # and not at all when nobody watches it
        looks.count = 0
        await asyncio.sleep(0.3)
        assert looks.count <= 1

    run_virtually(main())


def test_all_watchers_see_a_change_soon_and_one_that_has_been_at_once() -> None:
    async def main() -> None:
        looks, clock = Looks(), asyncio.get_running_loop().time
        watchers, one = watchers_of(looks), OpenJob(job("j"))
        waiting = [asyncio.create_task(watchers.wait(one, "1", 10.0)) for _ in range(3)]
        await asyncio.sleep(0.15)
        assert not any(task.done() for task in waiting)
        looks.version = "2"
        started_s = clock()
        views = await asyncio.gather(*waiting)
        assert clock() - started_s <= 0.1
        # one look for all of them
        assert len(set(map(id, views))) == looks.num_views == 1
        started_s = clock()
        # who comes later looks alone
        assert await watchers.wait(one, "1", 10.0) is None
        assert clock() == started_s
        watchers.close()

    run_virtually(main())


def test_a_check_wakes_watchers_at_once() -> None:
    async def main() -> None:
        looks, clock = Looks(), asyncio.get_running_loop().time
        watchers, one = watchers_of(looks), OpenJob(job("j"))
        waiting = asyncio.create_task(watchers.wait(one, "1", 10.0))
        await asyncio.sleep(0)
        looks.version = "2"
        started_s = clock()
        watchers.check(one)
        assert await waiting is not None
        assert clock() == started_s
        watchers.close()

    run_virtually(main())


async def test_who_leaves_or_waits_too_long_leaves_nothing() -> None:
    watchers, one = watchers_of(Looks()), OpenJob(job("j"))
    gone = asyncio.create_task(watchers.wait(one, "1", 10.0))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    assert await watchers.wait(one, "1", 0.01) is None
    assert not watchers._watched
    watchers.close()


async def test_who_has_seen_a_change_before_the_check_waits_for_the_next_one() -> None:
    looks = Looks()
    watchers, one = watchers_of(looks), OpenJob(job("j"))
    first = asyncio.create_task(watchers.wait(one, "1", 5.0))
    await asyncio.sleep(0)
    looks.version = "2"
    second = asyncio.create_task(watchers.wait(one, "2", 0.3))
    # it is no news to the second, and the first hears of it at once
    assert await first is not None
    assert await second is None
    watchers.close()
