"""The keys in force last are there for a dispatcher that starts without any."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.config.sections.keys import ROLES, ApiKey
from ray_cluster.errors import ConfigError
from ray_cluster.jobs.store.sql_engine import JobStoreError
from tests.jobs.jobs_cell import JobsCell

KEYS = (ApiKey("a" * 64, "ci", ROLES), ApiKey.plain("secret"))


async def test_the_last_saved_keys_are_those_of_the_next_dispatcher(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as first:
        known = first.jobs_service.known_keys
        assert await known.load() == ()
        await known.save(KEYS[:1])
        await known.save(KEYS)
    async with JobsCell(tmp_path, epoch=2) as second:
        known = second.jobs_service.known_keys
        # in the order of their digests, as it has put them in force
        assert set(await known.load()) == set(KEYS)
        assert "secret" not in str(second.store.control())
        await known.save(())
        assert await known.load() == ()


@pytest.mark.parametrize("document", ["", "{}", '{"version": 1, "value": [{"weight": 2}]}'])
async def test_keys_that_cannot_be_read_do_not_open_the_service(
    tmp_path: Path, document: str
) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.store.save_control("api_keys", document)
        with pytest.raises(ConfigError, match=r"set http\.api_keys, or http\.open: true"):
            await cell.jobs_service.known_keys.load()


async def test_a_store_that_fails_neither_opens_the_service_nor_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise JobStoreError("the disk is full")

    async with JobsCell(tmp_path) as cell:
        for method in ("control", "save_control"):
            monkeypatch.setattr(cell.store, method, fail)
        with pytest.raises(JobStoreError, match="disk is full"):
            await cell.jobs_service.known_keys.load()
        known = cell.jobs_service.known_keys
        saving = [asyncio.create_task(known.save(keys)) for keys in (KEYS, KEYS[:1])]
        await asyncio.sleep(0.1)
        assert "the set of API keys in force is not written yet" in caplog.text
        # what was revoked meanwhile stays so
        monkeypatch.undo()
        monkeypatch.setattr("ray_cluster.jobs.store.store_threads._RETRY_S", (0.02,))
        async with asyncio.timeout(10.0):
            await asyncio.gather(*saving)
        assert await known.load() == KEYS[:1]
