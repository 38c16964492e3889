"""A job store has one owner, and nobody else writes to it or deletes what it names."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.store import ownership
from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.ownership import JobStoreInUse
from ray_cluster.jobs.store.sql_owner import JobStoreTaken
from ray_cluster.jobs.store.sql_store import SqlJobStore
from tests.jobs.jobs_cell import JobsCell, Replica, job, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_BEAT_EVERY_S": 0.1, "_LOOK_EVERY_S": 0.05, "_SILENT_S": 1.0}.items():
        monkeypatch.setattr(ownership, name, seconds)


def cell_at(store_url: str, folder: Path, cell: str = "cell", **values: Any) -> JobsCell:
    found = JobsCell(folder, store=SqlJobStore.open(store_url), **values)
    found.jobs_service.ownership.cell = cell
    return found


async def test_another_cells_dispatcher_does_not_start_while_the_owner_lives(
    store_url: str, tmp_path: Path
) -> None:
    async with cell_at(store_url, tmp_path) as cell:
        await Replica(cell).register()
        await cell.create_job(job("j"))
        other = cell_at(store_url, tmp_path, cell="another")
        with pytest.raises(JobStoreInUse, match=f"process {os.getpid()} on .* another store"):
            await other.__aenter__()
        await other.__aexit__()
        assert await cell.cancel_job("alice", "j") is not None
    # it is free at once
    async with cell_at(store_url, tmp_path, cell="another") as other:
        assert other.jobs_service.num_open == 0


async def test_a_later_dispatcher_of_the_cell_takes_over_and_the_earlier_one_writes_no_more(
    store_url: str, tmp_path: Path
) -> None:
    async with cell_at(store_url, tmp_path) as old:
        mine = await Replica(old, "old").register()
        for name in ("job-1", "job-2"):
            await old.create_job(job(name))
        async with cell_at(store_url, tmp_path, epoch=2) as new:
            theirs = await Replica(new, "new").register()
            (lease,) = [one for one in (await mine.poll()).values() if one.request.job_id == ""][:1]
            (same,) = [
                one
                for one in (await theirs.poll()).values()
                if one.request.request_id == lease.request.request_id
            ]
            await theirs.finish(same)
            name = lease.request.request_id.removesuffix("-0")
            view = await new.job("alice", name, 5.0)
            assert view is not None
            assert view.job.state == "completed"
            # the earlier one's replica is unlucky: the image that was made stays
            await mine.fail(lease)
            await until(lambda: old.jobs_service.ownership.is_lost)
            await asyncio.sleep(0.2)
            assert new.results.num_bytes(f"{lease.request.request_id}.png")
            assert "another dispatcher has taken" in " ".join(await old.warnings())
            # no call is sent to its gateways
            with pytest.raises(JobStoreUnavailable, match="another dispatcher"):
                await old.starting()
            # what it would accept is not accepted
            with pytest.raises(Exception, match="job store"):
                await old.create_job(job("job-3"))
            assert await new.job("alice", "job-3") is None
            for sweeper in (old.jobs_service._sweeper, old.jobs_service._input_sweeper):
                with pytest.raises(JobStoreTaken):
                    await sweeper.sweep()
    # the earlier one has not released what is not its own
    again = SqlJobStore.open(store_url)
    owner = again.owner()
    assert owner is not None
    assert (owner.epoch, owner.is_released) == (2, True)
    again.close()


async def test_an_owner_that_is_silent_is_followed(store_url: str, tmp_path: Path) -> None:
    gone = SqlJobStore.open(store_url)
    gone.take(replace(Holder.here("gone"), space="another machine"), None)
    gone.insert(job("j"))
    async with cell_at(store_url, tmp_path) as cell:
        assert cell.jobs_service.num_open == 1
        # it was only slow
        for write in (lambda: gone.insert(job("k")), gone.beat, lambda: gone.update(job("j"))):
            with pytest.raises(JobStoreTaken):
                write()
    gone.close()


async def test_an_owner_whose_process_has_ended_is_followed_at_once(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_SILENT_S", 1e6)
    program = f"""
import os, signal
from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.sql_store import SqlJobStore
store = SqlJobStore.open({store_url!r})
store.take(Holder.here("other"), None)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
    await process.wait()
    async with cell_at(store_url, tmp_path) as cell:
        assert cell.jobs_service.num_open == 0


async def test_of_two_that_start_at_once_one_owns(store_url: str, tmp_path: Path) -> None:
    cells = [cell_at(store_url, tmp_path, cell=name) for name in ("a", "b")]
    started = await asyncio.gather(*(one.__aenter__() for one in cells), return_exceptions=True)
    errors = [one for one in started if isinstance(one, Exception)]
    assert len(errors) == 1
    for cell in cells:
        await cell.__aexit__()


def test_a_process_is_known_by_its_start_and_a_zombie_is_dead() -> None:
    me = Holder.here("c")
    assert not me.is_dead
    assert replace(me, process=f"{os.getpid()} 1").is_dead
    assert not replace(me, process="").is_dead
    assert not replace(me, process="999999999 1", space="elsewhere").is_dead
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert replace(me, process=f"{child.pid} 1").is_dead
    child.wait()
