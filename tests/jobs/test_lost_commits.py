"""Connections to a real PostgreSQL server that are cut at a COMMIT, before or after its effect."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from ray_cluster.jobs.store.sql_store import SqlJobStore
from tests.jobs.conftest import PostgresServer
from tests.jobs.cutting_proxy import Cut, CuttingProxy
from tests.jobs.jobs_cell import JobsCell, Replica, job, until


@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("num_cuts", [1, 3])
async def test_every_job_is_made_once_or_refused_for_good(
    postgres: PostgresServer, tmp_path: Path, cut: Cut, num_cuts: int
) -> None:
    database = f"cuts_{time.monotonic_ns()}"
    postgres.create(database)
    async with CuttingProxy(postgres.port) as proxy:
        url = PostgresServer(proxy.port).url(database)
        store = await asyncio.to_thread(SqlJobStore.open, url)
        async with JobsCell(tmp_path, store=store) as cell:
            replica = await Replica(cell).register()
            await asyncio.sleep(0.2)
            proxy.cuts = [cut] * num_cuts
            jobs = [job(f"j{number}", idempotency_key=f"k{number}") for number in range(8)]
            created = await asyncio.gather(*map(cell.create_job, jobs), return_exceptions=True)
            assert not proxy.cuts
            if num_cuts == 1:
                assert not [one for one in created if isinstance(one, BaseException)]
            again = await asyncio.gather(
                *(
                    cell.create_job(job(f"again{number}", idempotency_key=f"k{number}"))
                    for number in range(8)
                )
            )
            for first, second in zip(created, again, strict=True):
                assert second.is_new == isinstance(first, BaseException)
            await until(lambda: not cell.jobs_service._creation._doubtful)
            assert len(await asyncio.to_thread(store.unfinished)) == cell.jobs_service.num_open == 8
            # their ends are written once, whatever is cut
            proxy.cuts = [cut] * num_cuts
            made = 0
            while leases := list((await replica.poll()).values()):
                for lease in leases:
                    await replica.finish(lease)
                    made += 1
            assert made == 8
            await until(lambda: cell.jobs_service.num_open == 0)
            assert await asyncio.to_thread(store.unfinished) == []
