"""The job store's thread: one order, writes together, nobody waits longer than they would."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import Kind, StoreThreads
from tests.jobs.jobs_cell import job, until


class Store(SqlJobStore):
    """Counts its transactions that write."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.num_writes = 0
        sa.event.listen(engine, "before_cursor_execute", self._count)

    def _count(self, *event: object) -> None:
        self.num_writes += event[2] == "BEGIN IMMEDIATE"


@asynccontextmanager
async def working(folder: Path) -> AsyncIterator[tuple[Store, StoreThreads]]:
    store = Store.open(f"sqlite:///{folder}/jobs.db")
    assert isinstance(store, Store)
    store.num_writes = 0
    thread = StoreThreads(store)
    yield store, thread
    await thread.close()


@asynccontextmanager
async def held(thread: StoreThreads, kind: Kind = "write") -> AsyncIterator[None]:
    """Keep the thread of writes, or of reads, from anything else meanwhile."""
    gate = threading.Event()
    holding = asyncio.create_task(thread.call(kind, lambda: gate.wait(10.0)))
    await asyncio.sleep(0.05)
    try:
        yield
    finally:
        gate.set()
        await holding


async def test_writes_that_wait_go_together_and_hold_up_no_read(tmp_path: Path) -> None:
    async with working(tmp_path) as (store, thread):
        async with held(thread):
            writes = [
                asyncio.create_task(thread.visit().write(store.insert, job(f"j{i}")))
                for i in range(9)
            ]
            assert await thread.visit().read(store.get, "j8") is None
        await asyncio.gather(*writes)
        assert store.num_writes == 1
        assert await thread.visit().read(store.get, "j8") is not None
        # nothing waits: it is not held back for company
        await thread.visit().write(store.insert, job("alone"))
        assert store.num_writes == 2


async def test_reads_are_taken_in_turn_by_client(tmp_path: Path) -> None:
    order: list[str] = []

    def look(client: str) -> None:
        order.append(client)
        time.sleep(0.002)

    async with working(tmp_path) as (_, thread):
        async with held(thread, "read"):
            clients = ["alice"] * 20 + ["bob"] * 2
            reads = [asyncio.create_task(thread.visit(one).read(look, one)) for one in clients]
            await asyncio.sleep(0)
        await asyncio.gather(*reads)
    assert sorted(order) == sorted(clients)
    assert "bob" in order[:2]
    assert order[:6].count("bob") == 2


async def test_no_more_than_some_reads_of_a_client_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.store.store_threads._MOST_WAITING", 3)
    async with working(tmp_path) as (store, thread):
        for _ in range(2):
            async with held(thread, "read"):
                clients = ["alice"] * 3 + ["bob"] + [""] * 5
                reads = [
                    asyncio.create_task(thread.visit(one).read(store.get, "j")) for one in clients
                ]
                await asyncio.sleep(0)
                with pytest.raises(JobStoreUnavailable) as caught:
                    await thread.visit("alice").read(store.get, "j")
                assert "busy" in str(caught.value.__cause__)
            assert await asyncio.gather(*reads) == [None] * 9
        assert not thread.is_failing


async def test_writes_keep_their_order_whoever_they_are_for(tmp_path: Path) -> None:
    async with working(tmp_path) as (store, thread):
        async with held(thread):
            ids = [f"j{n}" for n in range(250)]
            writes = [
                asyncio.create_task(thread.visit(f"client{n % 3}").write(store.insert, job(one)))
                for n, one in enumerate(ids)
            ]
            changed = asyncio.create_task(
                thread.call("write", lambda: store.update(replace(job("j249"), state="failed")))
            )
            await asyncio.sleep(0)
        await asyncio.gather(*writes, changed)
        last = store.get("j249")
        assert last is not None
        assert last.state == "failed"


async def test_one_that_fails_among_others_fails_alone(tmp_path: Path) -> None:
    async with working(tmp_path) as (store, thread):
        async with held(thread):
            ids = ["j0", "j1", "j1", "j2"]
            writes = [
                asyncio.create_task(thread.visit().write(store.insert, job(job_id)))
                for job_id in ids
            ]
            await asyncio.sleep(0)
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert [isinstance(one, JobStoreUnavailable) for one in results] == [False] * 2 + [
            True,
            False,
        ]
        assert {one.job_id for one in store.unfinished()} == set(ids)
        assert not thread.is_failing


async def test_a_locked_store_is_known_to_be_well_again_though_nobody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.store.store_threads._PROBE_EVERY_S", 0.05)
    async with working(tmp_path) as (store, thread):
        blocker = sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        with pytest.raises(JobStoreUnavailable):
            await thread.visit().write(store.insert, job("j"))
        await asyncio.sleep(0.3)
        assert thread.is_failing
        assert await thread.visit().read(store.get, "j") is None
        blocker.execute("ROLLBACK")
        blocker.close()
        await until(lambda: not thread.is_failing)


async def test_whoever_would_wait_too_long_is_told_and_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.store.store_threads._TURN_S", 0.5)
    async with working(tmp_path) as (store, thread):
        async with held(thread):
            asked = asyncio.create_task(thread.visit().write(store.insert, job("asked")))
            own = asyncio.create_task(thread.call("write", lambda: store.insert(job("own"))))
            await asyncio.sleep(0.7)
        with pytest.raises(JobStoreUnavailable):
            await asked
        await own
        assert await thread.visit().read(store.get, "asked") is None
        assert await thread.visit().read(store.get, "own") is not None


async def test_a_store_that_fails_is_known_to_until_it_is_back(tmp_path: Path) -> None:
    is_away = True

    def look() -> str:
        if is_away:
            raise JobStoreError("sqlite:////secret/place is away")
        return "there"

    async with working(tmp_path) as (_, thread):
        assert not thread.is_failing
        with pytest.raises(JobStoreUnavailable) as caught:
            await thread.visit().read(look)
        assert "secret" not in str(caught.value)
        assert thread.is_failing
        with pytest.raises(JobStoreError, match="away"):
            await thread.call("read", look)
        is_away = False
        assert await thread.visit().read(look) == "there"
        assert not thread.is_failing


async def test_a_bug_ends_its_call_and_no_other(tmp_path: Path) -> None:
    async with working(tmp_path) as (store, thread):
        with pytest.raises(ZeroDivisionError):
            await thread.call("read", lambda: 1 / 0)
        assert await thread.visit().read(store.get, "nobody") is None


async def test_closing_does_what_waits(tmp_path: Path) -> None:
    async with working(tmp_path) as (store, thread), held(thread):
        left = asyncio.create_task(thread.visit().write(store.insert, job("left")))
        await asyncio.sleep(0)
        left.cancel()
    again = SqlJobStore.open(f"sqlite:///{tmp_path}/jobs.db")
    assert again.get("left") is not None
    again.close()
