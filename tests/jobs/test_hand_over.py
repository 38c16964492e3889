"""A later cell of a service takes over from an earlier one that still runs: nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.store import ownership
from ray_cluster.jobs.store.ownership import JobStoreInUse
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.leases import Poll
from ray_cluster.requests import state_name
from ray_cluster.storage.blob_store import BlobStore
from tests.fakes import image_request
from tests.jobs.jobs_cell import MODELS, JobsCell, Replica, job, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


def be_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"_BEAT_EVERY_S": 0.1, "_LOOK_EVERY_S": 0.05, "_SILENT_S": 1.0}
    for name, seconds in (times | {"_SUCCESSOR_SILENT_S": 1.5}).items():
        monkeypatch.setattr(ownership, name, seconds)


def cell_of(store_url: str, folder: Path, cell: str, **values: Any) -> JobsCell:
    store = SqlJobStore.open(store_url)
    return JobsCell(folder, cell=cell, store=store, **{"service": "prod/images", **values})


async def replicas_of(cell: JobsCell) -> list[Replica]:
    return [
        await Replica(cell, f"{id(cell)}-{model}", model).register(pool=model) for model in MODELS
    ]


class Later:
    """The front of a later Ray cluster: workers register before it serves."""

    def __init__(self, store_url: str, folder: Path, cell: str = "later") -> None:
        self.cell = cell_of(store_url, folder, cell, epoch=2)
        self.starting: asyncio.Task[bool]

    async def __aenter__(self) -> Later:
        assert await self.cell.jobs_service.ownership.stands_by()
        await self.cell.front.begin()
        self.starting = asyncio.create_task(self.cell.restored.wait())
        return self

    async def serve(self) -> None:
        """Have all workers register, and wait until it has taken over."""
        await replicas_of(self.cell)
        await asyncio.wait_for(self.starting, 10)

    async def __aexit__(self, *_: object) -> None:
        self.starting.cancel()
        await self.cell.front.stop()


async def test_jobs_go_on_in_the_later_cell_and_attached_calls_end_in_the_earlier(
    store_url: str, tmp_path: Path
) -> None:
    async with cell_of(store_url, tmp_path, "earlier") as old:
        mine = (await replicas_of(old))[0]
        for name in ("done", "open"):
            await old.create_job(job(name, 2))
        attached = asyncio.create_task(old.submit((image_request("attached"),), "client", 30.0))
        await until(lambda: old.core.knows("attached"))
        leases = await mine.poll()
        await mine.finish(leases["done-0"])
        await mine.finish(leases["done-1"])
        await mine.finish(leases["open-0"])
        states = BlobStore(str(tmp_path / "states"))
        states.put(state_name("open-1"), b"state")
        async with Later(store_url, tmp_path) as later:
            new = later.cell
            # not before all workers of the later one are there
            await asyncio.sleep(0.4)
            assert (await old.settings("gateway", "", 0.0)) is not None
            assert (await new.settings("gateway", "", 0.0)) is None
            assert await old.starting() == ()
            theirs = (await replicas_of(new))[0]
            await asyncio.wait_for(later.starting, 10)
            assert (await new.settings("gateway", "", 0.0)) is not None
            # gateways of the earlier one are not ready any more, and say why
            await until(lambda: old.jobs_service.ownership.is_succeeded)
            for call in (
                old.starting(),
                old.create_job(job("late")),
                old.cancel_job("alice", "open"),
            ):
                with pytest.raises(JobStoreUnavailable, match="later Ray cluster"):
                    await call
            assert "later Ray cluster" in " ".join(await old.warnings())
            old.front.check_health()
            # jobs are the later one's alone
            reply = await old.dispatch.poll(
                Poll(mine.replica_id, mine.epoch, 0, dict.fromkeys(mine.leases, 3))
            )
            assert set(reply.aborts) == set(reply.moved) == {"open-1"}
            assert (await mine.poll()).keys() == {"attached"}
            assert states.get(state_name("open-1")) == b"state"
            await new.restored.wait()
            rest = await theirs.poll()
            assert rest.keys() == {"open-1"}
            # whoever waits at the earlier one for a job hears of its end
            waiting = asyncio.create_task(ended(old, "open"))
            await theirs.finish(rest["open-1"])
            assert await asyncio.wait_for(waiting, 10) == "completed"
            for name in ("done", "open"):
                view = await new.job("alice", name)
                assert view is not None
                assert view.job.state == "completed"
            # a call that waits without a job is served to its end
            await mine.finish(mine.leases["attached"])
            outcomes = await asyncio.wait_for(attached, 10)
            assert outcomes
            new.front.check_health()


async def ended(cell: JobsCell, job_id: str) -> str:
    while True:
        view = await cell.job("alice", job_id, 1.0)
        assert view is not None
        if view.job.is_final:
            return view.job.state


async def test_the_earlier_cell_does_not_want_it_back_but_comes_back_once_it_is_alone(
    store_url: str, tmp_path: Path
) -> None:
    async with cell_of(store_url, tmp_path, "earlier") as old:
        async with Later(store_url, tmp_path) as later:
            await later.serve()
            # one of the earlier cell that starts anew stands by, whatever registers with it
            async with Later(store_url, tmp_path, "earlier") as again:
                await replicas_of(again.cell)
                await asyncio.sleep(0.7)
                assert not again.starting.done()
                later.cell.front.check_health()
            old.front.check_health()
        # the later one is gone: Serve starts the earlier one anew, which takes the store
        await until(lambda: old.jobs_service.ownership.is_lost, 10)
        with pytest.raises(RuntimeError, match="is to be taken"):
            old.front.check_health()
    async with cell_of(store_url, tmp_path, "earlier", epoch=3) as old:
        await replicas_of(old)
        await old.create_job(job("j"))


async def test_one_of_another_service_does_not_start(store_url: str, tmp_path: Path) -> None:
    async with cell_of(store_url, tmp_path, "earlier"):
        for service in ("prod/others", None):
            other = cell_of(store_url, tmp_path, "later", service=service)
            with pytest.raises(JobStoreInUse, match="another store"):
                await other.front.begin()
            await other.front.stop()


async def test_a_store_of_a_silent_cell_is_taken_without_being_asked_for(
    store_url: str, tmp_path: Path
) -> None:
    old = cell_of(store_url, tmp_path, "earlier")
    await old.front.start()
    # as with a machine that is gone: nothing is said
    await old.jobs_service.ownership._keeping.close()
    async with Later(store_url, tmp_path) as later:
        await asyncio.wait_for(later.starting, 10)
    await old.front.stop()
