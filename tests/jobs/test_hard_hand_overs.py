"""A hand-over in which something else happens: rivals, stores that fail, cells that come back."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.store import ownership
from ray_cluster.jobs.store.holder import Holder
from ray_cluster.jobs.store.sql_owner import JobStoreTaken, Owner
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.protocol.jobs import Job, JobQuery
from ray_cluster.protocol.leases import Poll
from ray_cluster.requests import state_name
from ray_cluster.storage.blob_store import BlobStore
from tests.jobs.jobs_cell import JobsCell, Replica, job, until
from tests.jobs.test_failing_store import Unreliable
from tests.jobs.test_hand_over import Later, be_quick, cell_of, replicas_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    be_quick(monkeypatch)


async def test_one_that_comes_second_waits_on(store_url: str, tmp_path: Path) -> None:
    async with (
        cell_of(store_url, tmp_path, "earlier") as old,
        Later(store_url, tmp_path, "b") as first,
        Later(store_url, tmp_path, "c") as last,
    ):
        # both have seen that nobody owns it
        taken, take = threading.Event(), last.cell.store.take

        def take_later(*of: object) -> None:
            taken.wait(5)
            take(*of)

        last.cell.store.take = take_later
        for one in (last, first):
            await replicas_of(one.cell)
        await asyncio.wait_for(first.starting, 10)
        taken.set()
        # it has lost, and asks the one that has won
        await asyncio.wait_for(last.starting, 10)
        for cell in (old, first.cell, last.cell):
            cell.front.check_health()
        assert first.cell.jobs_service.ownership.is_handed_over


async def test_a_store_that_is_locked_for_a_while_ends_no_wait(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "_SILENT_S", 60.0)
    outsider = SqlJobStore.open(store_url)

    def lock() -> None:
        with outsider.together():
            owner = outsider.owner()
            assert owner is not None
            outsider.ask(owner, "nobody")
            time.sleep(1.5)

    async with cell_of(store_url, tmp_path, "earlier"), Later(store_url, tmp_path) as later:
        locking = asyncio.create_task(asyncio.to_thread(lock))
        await replicas_of(later.cell)
        await locking
        await asyncio.wait_for(later.starting, 10)
        later.cell.front.check_health()
    outsider.close()


async def test_what_is_still_starting_is_handed_over_once_it_has(
    store_url: str, tmp_path: Path
) -> None:
    class Slow(Unreliable):
        goes_on = threading.Event()

        def unfinished(self) -> list[Job]:
            found = self._inner.unfinished()
            self.goes_on.wait(10)
            return found

    async with cell_of(store_url, tmp_path, "before") as before:
        await replicas_of(before)
        await before.create_job(job("j"))
    slow = Slow(SqlJobStore.open(store_url))
    old = JobsCell(tmp_path, cell="earlier", service="prod/images", store=slow)
    starting = asyncio.create_task(old.front.start())
    await until(lambda: (owner := slow.owner()) and not owner.is_released)
    async with Later(store_url, tmp_path) as later:
        [mine, *_] = await replicas_of(old)
        await replicas_of(later.cell)
        await asyncio.sleep(0.5)
        slow.goes_on.set()
        await starting
        await asyncio.wait_for(later.starting, 10)
        await until(lambda: old.jobs_service.ownership.is_succeeded)
        # nobody else makes it
        assert (old.jobs_service.num_open, later.cell.jobs_service.num_open) == (0, 1)
        assert not await mine.poll()
    await old.front.stop()


async def test_one_that_was_held_up_takes_nothing_from_the_living(
    store_url: str, tmp_path: Path
) -> None:
    class Suspended(Unreliable):
        is_suspended = False
        seen: Owner | None = None

        def owner(self) -> Owner | None:
            if not self.is_suspended:
                self.seen = self._inner.owner()
                return self.seen
            # right after it has read the same again
            time.sleep(1.5)
            self.is_suspended = False
            return self.seen

    async with (
        cell_of(store_url, tmp_path, "earlier") as old,
        Later(store_url, tmp_path) as later,
    ):
        waits = Suspended(later.cell.store)
        later.cell.jobs_service.ownership._store = waits
        await until(lambda: waits.seen)
        waits.is_suspended = True
        await asyncio.sleep(2.0)
        assert not later.starting.done()
        old.front.check_health()


def test_a_hand_over_that_was_not_committed_is_made_again(store: SqlJobStore) -> None:
    store.take(Holder.here("cell"), None)
    with suppress(ZeroDivisionError), store.together():
        store.release()
        raise ZeroDivisionError
    store.release()
    owner = store.owner()
    assert owner is not None
    assert owner.is_released
    for write in (store.beat, lambda: store.insert(job("j")), store.release):
        with pytest.raises(JobStoreTaken):
            write()


async def test_a_failure_in_the_last_moment_deletes_nothing(
    store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cell_of(store_url, tmp_path, "earlier") as old:
        mine = (await replicas_of(old))[0]
        await old.create_job(job("j", 2))
        leases = await mine.poll()
        states = BlobStore(str(tmp_path / "states"))
        states.put(state_name("j-1"), b"state")
        leave = old.dispatch.leave

        async def fail_first(ids: list[str]) -> None:
            await mine.fail(leases["j-0"])
            await asyncio.sleep(0.1)
            await leave(ids)

        monkeypatch.setattr(old.dispatch, "leave", fail_first)
        async with Later(store_url, tmp_path) as later:
            await later.serve()
            assert old.jobs_service.ownership.is_handed_over
            reply = await old.dispatch.poll(Poll(mine.replica_id, mine.epoch, 0, {"j-1": 3}))
            assert reply.aborts == reply.moved == ("j-1",)
            await asyncio.sleep(0.2)
            assert states.get(state_name("j-1")) == b"state"


async def test_replicas_of_a_cell_that_starts_again_drop_images_of_others_and_their_states_stay(
    store_url: str, tmp_path: Path
) -> None:
    old = cell_of(store_url, tmp_path, "earlier")
    await old.front.start()
    await replicas_of(old)
    await old.create_job(job("j"))
    # as with a machine that is gone: nothing is said
    await old.jobs_service.ownership._keeping.close()
    async with Later(store_url, tmp_path) as later:
        await asyncio.wait_for(later.starting, 10)
        async with Later(store_url, tmp_path, "earlier") as again:
            mine = await Replica(again.cell).register()
            reply = await again.cell.dispatch.poll(Poll("r", mine.epoch, 0, {"j-0": 3}))
            assert reply.aborts == reply.moved == ("j-0",)
            assert later.cell.jobs_service.num_open == 1
    await old.front.stop()


async def test_a_page_of_open_jobs_is_the_later_ones_to_give(
    store_url: str, tmp_path: Path
) -> None:
    async with cell_of(store_url, tmp_path, "earlier") as old:
        await replicas_of(old)
        await old.create_job(job("j"))
        async with Later(store_url, tmp_path) as later:
            await later.serve()
            for state in ("queued", "running"):
                with pytest.raises(JobStoreUnavailable, match="later Ray cluster"):
                    await old.jobs(JobQuery("alice", state))
            assert len((await later.cell.jobs(JobQuery("alice", "queued"))).views) == 1
            assert len((await old.jobs(JobQuery("alice"))).views) == 1


async def test_an_upgrade_that_was_interrupted_goes_on(store_url: str, tmp_path: Path) -> None:
    async with cell_of(store_url, tmp_path, "earlier"), Later(store_url, tmp_path) as later:
        await later.serve()
    # the later one was gone for long, so that the earlier one came back
    async with (
        cell_of(store_url, tmp_path, "earlier", epoch=3) as old,
        Later(store_url, tmp_path) as later,
    ):
        await later.serve()
        assert old.jobs_service.ownership.is_handed_over
        # and that one does still not want it back
        async with Later(store_url, tmp_path, "earlier") as again:
            await replicas_of(again.cell)
            await asyncio.sleep(0.7)
            assert not again.starting.done()


@pytest.mark.parametrize("ahead_s", [600.0, -600.0])
async def test_clocks_that_differ_by_minutes_end_no_job_before_its_begin(
    store_url: str, tmp_path: Path, ahead_s: float
) -> None:
    async with cell_of(store_url, tmp_path, "earlier") as old:
        await replicas_of(old)
        await old.create_job(job("j"))
        later = Later(store_url, tmp_path)
        later.cell.jobs_service._wall_clock = lambda: time.time() + ahead_s
        async with later:
            mine = (await replicas_of(later.cell))[0]
            await asyncio.wait_for(later.starting, 10)
            await until(lambda: later.cell.core.num_waiting)
            await mine.finish((await mine.poll())["j-0"])
            view = await later.cell.job("alice", "j", 5.0)
    assert view is not None
    assert view.job.state == "completed"
    assert (view.job.finished_s or 0.0) >= view.job.created_s


@pytest.mark.parametrize("document", ["null", "[" * 100_000], ids=["null", "deep"])
async def test_what_is_saved_and_cannot_be_read_stops_no_start(
    store_url: str, tmp_path: Path, document: str
) -> None:
    names = ("hand_over", "plan", "memory", "mode", "round-0")
    store = SqlJobStore.open(store_url)
    store.take(Holder.here("before"), None)
    for name in names:
        store.save_control(name, document)
    store.release()
    async with cell_of(store_url, tmp_path, "earlier") as old:
        await old.create_job(job("j"))
        # nor an owner that has started
        await asyncio.to_thread(old.store.save_control, "hand_over", document)
        await asyncio.sleep(0.3)
        seen = await asyncio.to_thread(old.store.owner)
        await asyncio.sleep(0.3)
        assert await asyncio.to_thread(old.store.owner) != seen
    store.close()
