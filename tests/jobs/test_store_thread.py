"""The job store's thread: one order, writes together, nobody waits longer than they would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.sql_store import SqlJobStore
from ray_cluster.jobs.store import JobStoreError
from ray_cluster.jobs.store_thread import StoreThread
from tests.jobs.cell import job


class Store(SqlJobStore):
    """Counts its transactions that write."""

    def __init__(self, engine: sa.Engine) -> None:
        super().__init__(engine)
        self.num_writes = 0
        sa.event.listen(engine, "before_cursor_execute", self._count)

    def _count(self, *event: object) -> None:
        self.num_writes += event[2] == "BEGIN IMMEDIATE"


@asynccontextmanager
async def working(folder: Path) -> AsyncIterator[tuple[Store, StoreThread]]:
    store = Store.open(f"sqlite:///{folder}/jobs.db")
    assert isinstance(store, Store)
    store.num_writes = 0
    thread = StoreThread(store)
    yield store, thread
    await thread.close()


@asynccontextmanager
async def held(thread: StoreThread) -> AsyncIterator[None]:
    """Keep the store's thread from anything else meanwhile."""
    gate = threading.Event()
    holding = asyncio.create_task(thread.call("read", lambda: gate.wait(10.0)))
    await asyncio.sleep(0.05)
    try:
        yield
    finally:
        gate.set()
        await holding


async def test_writes_that_wait_go_together_and_keep_their_order(tmp_path: Path) -> None:
    async with working(tmp_path) as (store, thread):
        async with held(thread):
            writes = [
                asyncio.create_task(thread.visit().write(store.insert, job(f"j{i}")))
                for i in range(9)
            ]
            await asyncio.sleep(0)
            read = asyncio.create_task(thread.visit().read(store.get, "j8"))
            await asyncio.sleep(0)
            twice = asyncio.create_task(thread.visit().write(store.insert, job("j8")))
            late = asyncio.create_task(thread.visit().write(store.insert, job("j9")))
            await asyncio.sleep(0)
        assert [kept.job_id for kept in await asyncio.gather(*writes)] == [
            f"j{i}" for i in range(9)
        ]
        found = await read
        assert found is not None
        assert found.job_id == "j8"
        with pytest.raises(JobStoreUnavailable):
            await twice
        assert (await late).job_id == "j9"
        assert store.num_writes == 2
        # nothing waits: it is not held back for company
        await thread.visit().write(store.insert, job("alone"))
        assert store.num_writes == 3


async def test_whoever_would_wait_too_long_is_told_and_nothing_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray_cluster.jobs.store_thread._TURN_S", 0.1)
    async with working(tmp_path) as (store, thread):
        async with held(thread):
            asked = asyncio.create_task(thread.visit().write(store.insert, job("asked")))
            own = asyncio.create_task(thread.call("write", lambda: store.insert(job("own"))))
            await asyncio.sleep(0.2)
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
