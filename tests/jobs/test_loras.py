"""The registry of LoRAs outlives dispatchers, and loses nothing that open jobs need."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ray_cluster.config.loras import LoraEntry, LoraSettings
from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.sql_engine import JobStoreError
from ray_cluster.jobs.sql_store import SqlJobStore
from ray_cluster.policies.types import StepCost
from ray_cluster.protocol.leases import Poll, Registration
from ray_cluster.protocol.loras import Lora, LoraFacts, LoraReport
from ray_cluster.requests import AddOns, LoraUse
from tests.fakes import some_settings
from tests.jobs.cell import JobsCell, Replica, job, until

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
    reports = (LoraReport(lora_id, "ready", FACTS, took_s=1.0),)
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
    settings = SETTINGS.model_copy(update={"loras": LoraSettings(registered=entries)})
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(SETTINGS)
        cell.jobs_service.apply(settings)
        await until(lambda: len(cell.store.loras()) == 1)
        cell.jobs_service.apply(SETTINGS)
        [status] = await cell.loras("", 10)
        assert (status.lora.name, status.lora.is_pinned) == ("pastel", True)


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
