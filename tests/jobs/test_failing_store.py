"""Durable jobs over a store that is slow or fails: nothing is told that is not kept."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.config.sections.cell_wide import DispatchConfig
from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.jobs import Job, JobQuery
from tests.jobs.jobs_cell import JobsCell, Replica, job
from tests.running_time import RunningTime


class Unreliable:
    """A real store, of which a test replaces one method."""

    def __init__(self, inner: SqlJobStore) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class NoEnds(Unreliable):
    """Takes no end of a job while it fails."""

    fails = True

    def update(self, ended: Job) -> None:
        if self.fails:
            raise JobStoreError("the disk is full")
        self._inner.update(ended)


async def test_a_caller_that_leaves_while_its_job_is_written_has_a_job(tmp_path: Path) -> None:
    class Slow(Unreliable):
        def insert(self, new: Job) -> None:
            time.sleep(0.2)
            self._inner.insert(new)

    store = Slow(SqlJobStore.open(f"sqlite:///{tmp_path}/jobs.db"))
    async with JobsCell(tmp_path, store=store) as cell:
        await Replica(cell).register()
        leaves = asyncio.create_task(cell.create_job(job("j", idempotency_key="k")))
        await asyncio.sleep(0.05)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        again = await cell.create_job(job("other", idempotency_key="k"))
        assert again.view is not None
        assert (again.is_new, again.view.job.job_id) == (False, "j")
        assert cell.core.num_waiting == 1


async def test_what_cannot_be_kept_is_not_accepted(tmp_path: Path) -> None:
    class Failing(Unreliable):
        def insert(self, _job: Job) -> None:
            raise JobStoreError("the disk is full")

        withdraw = insert

    store = Failing(SqlJobStore.open(f"sqlite:///{tmp_path}/jobs.db"))
    async with JobsCell(tmp_path, store=store) as cell:
        replica = await Replica(cell).register()
        assert await cell.warnings() == ()
        # a sweep may be written along with one of them, and be well
        for job_id in ("j", "other"):
            with pytest.raises(JobStoreUnavailable):
                await cell.create_job(job(job_id))
        assert "job store" in " ".join(await cell.warnings())
        assert await replica.poll() == {}
        assert await cell.job("alice", "j") is None


async def test_an_end_is_told_only_once_it_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.store.store_threads._RETRY_S", (0.02,))
    store = NoEnds(SqlJobStore.open(f"sqlite:///{tmp_path}/jobs.db"))
    async with JobsCell(tmp_path, store=store) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j"))
        (lease,) = (await replica.poll()).values()
        await replica.finish(lease)
        view = await cell.job("alice", "j", 0.1)
        assert view is not None
        assert view.job.state == "running"
        store.fails = False
        view = await cell.job("alice", "j", 10.0)
        assert view is not None
        assert view.job.state == "completed"


async def test_who_waits_for_a_job_hears_its_end_without_another_read(tmp_path: Path) -> None:
    class Unreadable(Unreliable):
        def get(self, _job_id: str) -> Job | None:
            raise JobStoreError("nobody should ask")

    inner = SqlJobStore.open(f"sqlite:///{tmp_path}/jobs.db")
    async with JobsCell(tmp_path, store=Unreadable(inner)) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j", 2))
        waiting = [asyncio.create_task(cell.job("alice", "j", 10.0)) for _ in range(2)]
        for lease in list((await replica.poll()).values()):
            await replica.finish(lease)
        views = await asyncio.gather(*waiting)
        kept = inner.get("j")
        assert kept is not None
        assert kept.state == "completed"
        assert [view.job for view in views if view is not None] == [kept, kept]
        # another's job is nobody's
        with pytest.raises(JobStoreUnavailable):
            await cell.job("bob", "j")


async def test_a_cancel_that_cannot_be_kept_says_so_and_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.store.store_threads._RETRY_S", (0.02,))
    monkeypatch.setattr("ray_cluster.jobs.service._WRITTEN_S", 0.1)
    store = NoEnds(SqlJobStore.open(f"sqlite:///{tmp_path}/jobs.db"))
    async with JobsCell(tmp_path, store=store) as cell:
        replica = await Replica(cell).register()
        await cell.create_job(job("j"))
        with pytest.raises(JobStoreUnavailable):
            await cell.cancel_job("alice", "j")
        assert await replica.poll() == {}
        store.fails = False
        view = await cell.job("alice", "j", 10.0)
        assert view is not None
        assert view.job.state == "cancelled"


async def test_while_the_store_is_locked_jobs_are_refused_in_time_and_none_is_made(
    tmp_path: Path,
) -> None:
    async with JobsCell(tmp_path) as cell:
        replica = await Replica(cell).register()
        blocker = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        calls = [
            cell.create_job(job(f"j{index}", idempotency_key=f"k{index % 3}")) for index in range(9)
        ]
        with RunningTime() as running:
            refused = await asyncio.gather(*calls, return_exceptions=True)
        assert running.seconds < DispatchConfig().patience_s
        assert [type(one) for one in refused] == [JobStoreUnavailable] * 9
        blocker.execute("ROLLBACK")
        blocker.close()
        assert await replica.poll() == {}
        assert (await cell.jobs(JobQuery("alice"))).views == ()
        assert (await cell.create_job(job("j", idempotency_key="k0"))).is_new
