"""Images of earlier stages whose dispatcher died: deleted once nobody can need them any more."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ray_cluster.requests import candidate_name
from tests.fakes import FakeClock
from tests.jobs.jobs_cell import JobsCell, Replica, job


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(time.time())


async def test_only_old_ones_of_requests_that_nobody_has_are_swept(
    tmp_path: Path, clock: FakeClock
) -> None:
    mine = job("mine")
    async with JobsCell(tmp_path, wall_clock=clock) as cell:
        await Replica(cell).register()
        assert (await cell.create_job(mine)).offer.accepted
        [kept] = [candidate_name(one.request_id) for one in mine.requests]
        left, deep, late = "call.candidate", "call.candidate2", "recent.candidate"
        for name in (kept, left, deep, late, "call.png"):
            cell.results.put(name, b"image")
            age_s = 1.0 if name == late else 601.0
            os.utime(tmp_path / "results" / name, (clock.now_s - age_s, clock.now_s - age_s))
        await cell.jobs_service._sweeper.sweep()
        names = {blob.name for blob in cell.results.entries()}
        assert names == {kept, late, "call.png"}
