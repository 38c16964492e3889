"""A replica registers with what LoRAs cost on its own model."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

from ray_cluster.cell.kinds import build_skill
from ray_cluster.cell.worker import Worker
from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.slices import WorkerArguments
from ray_cluster.engine.adapters import grouping
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.leases import Registration
from ray_cluster.replica.host import Host
from tests.engine.random_models import save_sd
from tests.replica.lora_files import arguments
from tests.replica.setup import Link, new_service, until


class Noting(Link):
    registrations: tuple[Registration, ...] = ()

    async def register(self, registration: Registration) -> int:
        self.registrations += (registration,)
        return await super().register(registration)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Of LoRAs, one entry for each that was computed."""
    done: list[None] = []
    inner = grouping.grouped_low_rank

    def counted(*given: Any) -> Any:
        done.append(None)
        return inner(*given)

    monkeypatch.setattr(grouping, "grouped_low_rank", counted)
    return done


async def test_the_share_that_was_measured_is_in_the_registration_and_in_polls(
    tmp_path: Path, coder: ImageCoder, products: list[None]
) -> None:
    folder = save_sd(tmp_path / "sd")
    ticks = itertools.count()
    link = Noting(new_service())
    storage = StorageConfig(
        states=str(tmp_path / "states"),
        results=str(tmp_path / "results"),
        inputs=str(tmp_path / "inputs"),
    )
    pool = PoolConfig(name="m", model=str(folder), max_px=128)
    given = WorkerArguments(
        kind="denoise", name="m", pools=(pool,), storage=storage, loras=arguments(tmp_path)
    )
    # a thousandth of a second for whatever is done, and a hundredth for each product of a LoRA
    host = Host("one", "here", link, coder, lambda: 1e-3 * next(ticks) + 1e-2 * len(products))
    skill = await asyncio.to_thread(build_skill, given, None, host)
    assert products
    worker = Worker(skill)
    worker.start()
    try:
        await until(lambda: link.last_poll)
        [registration] = link.registrations
        assert registration.step_cost.lora_share > 0
        assert link.last_poll["one"].step_cost.lora_share == registration.step_cost.lora_share
    finally:
        await worker.drain()
