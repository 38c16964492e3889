"""Inputs are deleted only once no open request can name them, also by the next dispatcher."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.jobs import Job
from ray_cluster.requests import BlobRef, Edit, ImageRequest
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from tests.fakes import FakeClock
from tests.jobs.jobs_cell import JobsCell, Replica, job, until

GRACE_S = StorageConfig().inputs_grace_s
OWNER = "a" * 64


class Cell(JobsCell):
    """A cell whose ages are told by a fake clock."""

    def __init__(self, folder: Path, clock: FakeClock, epoch: int = 1) -> None:
        super().__init__(folder, epoch=epoch, wall_clock=clock)
        self.clock = clock
        self.folder = folder / "inputs"
        self.sweeper = self.jobs_service._input_sweeper

    async def put(self, data: bytes) -> BlobRef:
        ref = await self.inputs.put(OWNER, chunks(data), max_bytes=1000)
        now_s = self.clock.now_s
        os.utime(self.folder / f"{OWNER}.{ref.sha256}.{int(now_s // GRACE_S) % 3}", (now_s, now_s))
        return ref

    def has(self, ref: BlobRef) -> bool:
        return self.inputs.get(OWNER, ref) is not None

    async def sweep_for(self, seconds: float) -> None:
        """Sweep every minute of the fake clock."""
        for _ in range(int(seconds // 60)):
            self.clock.advance(60)
            await self.sweeper.sweep()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(time.time())


async def chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


def edit_job(job_id: str, ref: BlobRef, clock: FakeClock, num_images: int = 1) -> Job:
    made = job(job_id, num_images, created_s=clock.now_s)
    return replace(made, requests=tuple(edits(made.requests, ref)))


def edits(requests: tuple[ImageRequest, ...], ref: BlobRef) -> list[ImageRequest]:
    return [replace(one, edit=Edit(ref, (64, 64), 4), owner=OWNER) for one in requests]


async def test_an_input_that_nobody_names_goes_after_the_grace_age(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with Cell(tmp_path, clock) as cell:
        ref = await cell.put(b"image")
        await cell.sweep_for(GRACE_S)
        assert cell.has(ref)
        await cell.sweep_for(2 * GRACE_S)
        assert not cell.has(ref)


async def test_the_input_of_a_job_stays_until_the_job_has_ended(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with Cell(tmp_path, clock) as cell:
        replica = await Replica(cell).register()
        ref, other = await cell.put(b"image"), await cell.put(b"another")
        # its first use comes as late as it may
        clock.advance(GRACE_S)
        await cell.sweeper.sweep()
        await cell.create_job(edit_job("j", ref, clock, num_images=2))
        await cell.sweep_for(9 * GRACE_S)
        assert (cell.has(ref), cell.has(other)) == (True, False)
        first, second = (await replica.poll()).values()
        assert (first.request.owner, first.request.edit) == (OWNER, Edit(ref, (64, 64), 4))
        await cell.sweep_for(9 * GRACE_S)
        await replica.finish(first)
        await cell.sweep_for(9 * GRACE_S)
        assert cell.has(ref)
        await replica.finish(second)
        await until(lambda: cell.jobs_service.num_open == 0)
        await cell.sweep_for(3 * GRACE_S)
        assert not cell.has(ref)


async def test_the_input_of_a_job_whose_end_is_not_written_stays(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next dispatcher may have to make its image again."""

    def fail(*_: object) -> None:
        raise JobStoreError("the disk is full")

    async with Cell(tmp_path, clock) as cell:
        replica = await Replica(cell).register()
        ref = await cell.put(b"image")
        await cell.create_job(edit_job("j", ref, clock))
        (lease,) = (await replica.poll()).values()
        with monkeypatch.context() as patch:
            patch.setattr(cell.store, "update", fail)
            await replica.finish(lease)
            await cell.sweep_for(9 * GRACE_S)
            assert cell.has(ref)


async def test_the_input_of_a_client_that_waits_stays_until_it_has_its_image(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with Cell(tmp_path, clock) as cell:
        replica = await Replica(cell).register()
        ref = await cell.put(b"image")
        requests = edits(job("j").requests, ref)
        waits = asyncio.create_task(cell.submit(requests, "alice", 30.0))
        await until(lambda: cell.core.num_waiting == 1)
        await cell.sweep_for(9 * GRACE_S)
        (lease,) = (await replica.poll()).values()
        await cell.sweep_for(9 * GRACE_S)
        assert cell.has(ref)
        await replica.finish(lease)
        assert (await waits).outcomes
        await cell.sweep_for(3 * GRACE_S)
        assert not cell.has(ref)


async def test_the_next_dispatcher_keeps_the_inputs_of_the_jobs_that_it_finds(
    tmp_path: Path, clock: FakeClock
) -> None:
    async with Cell(tmp_path, clock) as old:
        await Replica(old).register()
        ref, other = await old.put(b"image"), await old.put(b"another")
        await old.create_job(edit_job("j", ref, clock))
    advance_to_a_sweep(clock)
    async with Cell(tmp_path, clock, epoch=2) as new:
        await until(lambda: not new.has(other))
        assert new.has(ref)
        replica = await Replica(new).register()
        (lease,) = (await replica.poll()).values()
        assert (lease.request.owner, lease.request.inputs) == (OWNER, (ref,))
        await replica.finish(lease)
        await until(lambda: new.jobs_service.num_open == 0)
        await new.sweep_for(3 * GRACE_S)
        assert not new.has(ref)


def advance_to_a_sweep(clock: FakeClock) -> None:
    """Let so much time pass that the next sweep deletes what was sent until now, if it can."""
    period = clock.now_s // GRACE_S
    clock.advance((period + 8.1) * GRACE_S - clock.now_s)


async def test_a_dispatcher_that_cannot_read_its_jobs_sweeps_nothing(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(tmp_path, clock)
    ref = await cell.put(b"image")
    advance_to_a_sweep(clock)

    def fail(_store: SqlJobStore) -> None:
        raise JobStoreError("away")

    monkeypatch.setattr(SqlJobStore, "unfinished", fail)
    with pytest.raises(JobStoreError):
        await cell.jobs_service.start()
    await asyncio.sleep(0.1)
    assert cell.has(ref)
    await cell.jobs_service.close()


async def test_a_store_that_fails_is_told_to_an_operator_and_ends_nothing(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_store: BlobStore) -> None:
        raise BlobStoreError("no list")

    monkeypatch.setattr("ray_cluster.jobs.sweeper._SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr("ray_cluster.jobs.sweeper._SWEEP_REST", 0.0)
    async with Cell(tmp_path, clock) as cell:
        assert cell.jobs_service.warnings == ()
        with monkeypatch.context() as patch:
            patch.setattr(cell.inputs._blobs, "entries", lambda: fail(cell.results))
            await until(lambda: "images that clients send" in " ".join(cell.jobs_service.warnings))
        await until(lambda: cell.jobs_service.warnings == ())
