"""The registry of LoRAs outlives dispatchers, and loses nothing that open jobs need."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.config.sections.loras import LoraEntry, LorasConfig
from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs import loras
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.calling.changes import Mark
from ray_cluster.protocol.leases import Poll, Registration
from ray_cluster.protocol.loras import Lora, LoraFacts, LoraReport, LoraReports
from ray_cluster.requests import AddOns, LoraUse
from tests.fakes import some_settings
from tests.jobs.jobs_cell import JobsCell, Replica, job, until

SETTINGS = some_settings(pools=[{"name": "m", "model": "shapes-sd"}])
PASTEL = Lora("", "pastel", "m", "builtin:pastel")
FACTS = LoraFacts("ab" * 32, 1_000_000, (8, 16), 12, changes_prompts=True)


async def test_what_is_registered_is_there_in_the_next_life(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        added = await cell.add_lora(PASTEL)
        assert added.refused is None
        assert added.status is not None
        first = added.status.lora
        assert first.lora_id.startswith("lora-")
        assert first.added_s > 0
        assert (await cell.add_lora(PASTEL)).status == added.status
        assert (added.is_new, (await cell.add_lora(PASTEL)).is_new) == (True, False)
        other = replace(PASTEL, source="builtin:outline")
        assert (await cell.add_lora(other)).refused == "exists"
        assert (await cell.add_lora(replace(PASTEL, base="x"))).refused == "unknown_base"
        await report_ready(cell, first.lora_id)
        await until(lambda: cell.store.loras()[0][1] == FACTS)
    async with JobsCell(tmp_path, epoch=2) as cell:
        [status] = await cell.loras("", 10)
        assert (status.lora, status.facts, status.state) == (first, FACTS, "registered")
        removed = await cell.remove_lora("pastel")
        assert removed is not None
        assert removed.state == "removing"
        assert cell.store.loras() == []
        assert await cell.remove_lora("pastel") is None
    async with JobsCell(tmp_path, epoch=3) as cell:
        assert await cell.loras("", 10) == ()


async def report_ready(cell: JobsCell, lora_id: str) -> None:
    store = Registration("s", None, 0, 1, StepCost(0.0, 0.0), kind="lora", node="n")
    epoch = await cell.dispatch.register(store)
    reports = LoraReports(Mark(1, 0), 1, (LoraReport(lora_id, "ready", FACTS, took_s=1.0),))
    await cell.dispatch.poll(Poll("s", epoch, 0, loras=reports), 0.0)


async def test_an_open_job_keeps_a_removed_lora_through_a_restart(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        await Replica(cell).register()
        status = (await cell.add_lora(PASTEL)).status
        assert status is not None
        uses = AddOns(loras=(LoraUse("pastel", 0.5, status.lora.lora_id),))
        plain = job("j")
        styled = replace(plain, requests=(replace(plain.requests[0], add_ons=uses),))
        assert (await cell.create_job(styled)).offer.accepted
        await cell.remove_lora("pastel")
        [(_, _, is_removed)] = cell.store.loras()
        assert is_removed
    async with JobsCell(tmp_path, epoch=2) as cell:
        assert await cell.loras("", 10) == ()
        replica = await Replica(cell).register()
        await replica.poll()
        [lease] = replica.leases.values()
        assert [one.lora for one in lease.loras] == [status.lora]
        await replica.finish(lease, b"image")
        await until(lambda: cell.store.loras() == [])


async def test_the_settings_register_some_and_take_none_away(tmp_path: Path) -> None:
    entries = (
        LoraEntry(name="pastel", base="m", source="builtin:pastel", is_pinned=True),
        LoraEntry(name="odd", base="nobody", source="builtin:odd"),
    )
    settings = SETTINGS.model_copy(update={"loras": LorasConfig(registered=entries)})
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        cell.jobs_service.apply(settings)
        await until(lambda: len(cell.core.loras) == 1)
        assert len(cell.store.loras()) == 1
        cell.jobs_service.apply(SETTINGS)
        [status] = await cell.loras("", 10)
        assert (status.lora.name, status.lora.is_pinned) == ("pastel", True)


async def test_one_of_the_settings_is_registered_once_the_store_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "_HOUSEKEEPING_S", 0.05)
    add_lora, num_failures = SqlJobStore.add_lora, 0

    def fails_at_first(store: SqlJobStore, lora: Lora) -> None:
        nonlocal num_failures
        if num_failures < 3:
            num_failures += 1
            raise JobStoreError("the store is busy")
        add_lora(store, lora)

    monkeypatch.setattr(SqlJobStore, "add_lora", fails_at_first)
    entry = LoraEntry(name="pastel", base="m", source="builtin:pastel")
    settings = SETTINGS.model_copy(update={"loras": LorasConfig(registered=(entry,))})
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(settings)
        await until(lambda: cell.core.loras.id_of("pastel") is not None)
        assert num_failures == 3
        assert len(cell.store.loras()) == 1


async def test_what_cannot_be_written_is_not_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise JobStoreError("the disk is full")

    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        with monkeypatch.context() as patch:
            patch.setattr(SqlJobStore, "add_lora", fails)
            with pytest.raises(JobStoreUnavailable):
                await cell.add_lora(PASTEL)
        assert await cell.loras("", 10) == ()
        assert (await cell.add_lora(PASTEL)).refused is None
        with monkeypatch.context() as patch:
            patch.setattr(SqlJobStore, "remove_lora", fails)
            with pytest.raises(JobStoreUnavailable):
                await cell.remove_lora("pastel")
        assert len(await cell.loras("", 10)) == 1


class Gate:
    """Holds the calls of a method of the store until a test opens it, or has them fail."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.fails = False
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any) -> Any:
            self.num_calls += 1
            assert self._opened.wait(30.0)
            if self.fails:
                raise JobStoreError("the disk is full")
            return method(*args)

        return held


@contextmanager
def gated(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Gate]:
    gate = Gate()
    with monkeypatch.context() as patch:
        patch.setattr(SqlJobStore, name, gate.wrap(getattr(SqlJobStore, name)))
        yield gate
        gate.open()


async def test_of_removals_at_once_one_removes_and_none_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        first = (await cell.add_lora(PASTEL)).status
        with gated(monkeypatch, "remove_lora") as gate:
            removals = [asyncio.create_task(cell.remove_lora("pastel")) for _ in range(3)]
            await until(lambda: gate.num_calls)
            # whoever wants the name again is in the queue before the last of them
            adding = asyncio.create_task(cell.add_lora(PASTEL))
            await asyncio.sleep(0)
            removals.append(asyncio.create_task(cell.remove_lora("pastel")))
            await asyncio.sleep(0)
            gate.open()
            removed = [one for one in await asyncio.gather(*removals) if one is not None]
            added = await adding
        assert [one.lora for one in removed] == [first.lora]
        assert added.is_new
        [status] = await cell.loras("", 10)
        assert status == added.status
        assert [row[0] for row in cell.store.loras()] == [added.status.lora]


async def test_a_second_registration_is_told_what_became_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        for fails in (True, False):
            with gated(monkeypatch, "add_lora") as gate:
                gate.fails = fails
                calls = [asyncio.create_task(cell.add_lora(PASTEL)) for _ in range(3)]
                await until(lambda gate=gate: gate.num_calls)
                await asyncio.sleep(0.01)
                # nobody is told anything, or sees it, before it is written
                assert not any(call.done() for call in calls)
                assert not (await cell.find_loras(("pastel",))).found
                assert await cell.remove_lora("pastel") is None
                gate.open()
                said = await asyncio.gather(*calls, return_exceptions=True)
            if fails:
                assert [type(one) for one in said] == [JobStoreUnavailable] * 3
                assert await cell.loras("", 10) == ()
            else:
                assert sum(one.is_new for one in said) == 1
                assert len({one.status.lora.lora_id for one in said}) == 1
        assert len(cell.store.loras()) == 1


async def test_a_registration_whose_caller_is_gone_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        with gated(monkeypatch, "add_lora") as gate:
            call = asyncio.create_task(cell.add_lora(PASTEL))
            await until(lambda: gate.num_calls)
            call.cancel()
            gate.open()
            await until(lambda: len(cell.core.loras) == 1)
        [status] = await cell.loras("", 10)
        assert [row[0] for row in cell.store.loras()] == [status.lora]


async def test_a_dispatcher_that_dies_between_leaves_no_lora_half_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loras, "_HOUSEKEEPING_S", 0.01)
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        lora = (await cell.add_lora(PASTEL)).status.lora
        # written, and the dispatcher's memory is gone before it knows
        cell.store.remove_lora(lora.lora_id)
    async with JobsCell(tmp_path, epoch=2) as cell:
        cell.jobs_service.apply(SETTINGS)
        assert await cell.loras("", 10) == ()
        await until(lambda: not cell.store.loras())
        # written, though its caller was told that it was not: then the next attempt as well
        for number in (1, 2):
            one = replace(PASTEL, lora_id=f"lora-{number}", added_s=float(number))
            cell.store.add_lora(one)
    async with JobsCell(tmp_path, epoch=3) as cell:
        [status] = await cell.loras("", 10)
        assert status.lora.lora_id == "lora-2"
        await until(lambda: len(cell.store.loras()) == 1)


async def test_what_is_being_written_counts_for_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS.model_copy(update={"loras": LorasConfig(max_loras=2, client_share=0.5)})
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(settings)
        with gated(monkeypatch, "add_lora") as gate:
            hers = asyncio.create_task(cell.add_lora(replace(PASTEL, name="a", owner="alice")))
            await until(lambda: gate.num_calls)
            more = await cell.add_lora(replace(PASTEL, name="b", owner="alice"))
            assert (more.refused, more.reason) == ("too_many_own", "1")
            his = asyncio.create_task(cell.add_lora(replace(PASTEL, name="c", owner="bob")))
            await until(lambda: len(cell.core.loras._registry._reserved) == 2)
            assert (await cell.add_lora(replace(PASTEL, name="d"))).refused == "too_many"
            gate.open()
            assert all(one.is_new for one in await asyncio.gather(hers, his))
