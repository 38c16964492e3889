"""How many images one client may have in flight, over all gateways; and what frees its places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from ray_cluster.config.loading import ClusterConfig, ConfigError, load_config
from ray_cluster.config.sections.cell_wide import LimitsConfig
from tests.api.checks import URL, error_of
from tests.api.conftest import app_of, http_of, shapes_profile
from tests.fakes import registration
from tests.jobs.jobs_cell import JobsCell, Replica, until

LIMITS = {"max_attached_images_per_client": 3, "max_images_per_request": 3}
POOLS = [{"name": "shapes", "model": "shapes-sd"}]


def body(num_images: int) -> dict[str, Any]:
    return {"prompt": "a red circle", "n": num_images}


class Gateways:
    """Several gateways over one dispatcher, as clients with addresses and keys call them."""

    def __init__(self, cell: JobsCell, replica: Replica, keys: list[str]) -> None:
        config = ClusterConfig.model_validate(
            {"pools": POOLS, "limits": LIMITS, "http": {"api_keys": keys}}
        )
        self.cell, self.replica = cell, replica
        self._apps = [app_of(cell, config, results=cell.results) for _ in range(2)]

    async def call(
        self, gateway: int, num_images: int, *, address: str = "10.0.0.1", **headers: str
    ) -> httpx.Response:
        async with http_of(self._apps[gateway], client=(address, 1234)) as http:
            return await http.post(URL, json=body(num_images), headers=headers)

    async def start(
        self, gateway: int, num_images: int, **who: str
    ) -> asyncio.Task[httpx.Response]:
        """Begin a call that will be admitted; returns when it is."""
        before = len(self.replica.leases)
        task = asyncio.create_task(self.call(gateway, num_images, **who))
        while len(self.replica.leases) < before + num_images and not task.done():
            await self.replica.poll()
        assert not task.done(), task.result().text
        return task

    async def finish_all(self) -> None:
        for lease in list(self.replica.leases.values()):
            await self.replica.finish(lease)


@asynccontextmanager
async def running(folder: Path, *keys: str) -> AsyncIterator[Gateways]:
    async with JobsCell(folder, limits=LimitsConfig(**LIMITS)) as cell:
        replica = Replica(cell, model="shapes")
        replica.epoch = await cell.dispatch.register(
            replace(registration("r", "shapes", max_in_flight=8), profile=shapes_profile())
        )
        yield Gateways(cell, replica, list(keys))


@pytest.fixture
async def gateways(tmp_path: Path) -> AsyncIterator[Gateways]:
    async with running(tmp_path) as one:
        yield one


async def test_the_limit_counts_what_all_gateways_have_of_a_client(gateways: Gateways) -> None:
    first = await gateways.start(0, 2)
    refused = await gateways.call(1, 2)
    assert refused.status_code == 429
    error = error_of(refused)
    assert (error["type"], error["code"]) == ("rate_limit_error", "too_many_images_in_flight")
    assert "at most 3 for one client" in error["message"]
    assert "limits.max_attached_images_per_client" in error["message"]
    assert refused.headers["x-should-retry"] == "true"
    # up to the limit it is served, and so is everybody else
    second = await gateways.start(1, 1)
    other = await gateways.start(1, 1, address="10.0.0.2")
    assert (await gateways.call(0, 1)).status_code == 429
    await gateways.finish_all()
    assert [(await task).status_code for task in (first, second, other)] == [200] * 3


async def test_a_client_is_its_key_wherever_it_calls_from(tmp_path: Path) -> None:
    async with running(tmp_path, "one", "two") as gateways:
        one = {"Authorization": "Bearer one"}
        first = await gateways.start(0, 3, address="10.0.0.1", **one)
        assert (await gateways.call(1, 1, address="10.0.0.2", **one)).status_code == 429
        second = await gateways.start(1, 1, address="10.0.0.1", Authorization="Bearer two")
        await gateways.finish_all()
        assert [(await task).status_code for task in (first, second)] == [200, 200]


async def test_finished_and_failed_images_free_their_places(gateways: Gateways) -> None:
    for _ in range(3):
        task = await gateways.start(0, 3)
        assert (await gateways.call(1, 1)).status_code == 429
        await gateways.finish_all()
        assert (await task).status_code == 200
    task = await gateways.start(0, 3)
    await gateways.replica.fail(next(iter(gateways.replica.leases.values())))
    # the failure ends the call, and the call gives up its others
    assert (await task).status_code == 500
    await gateways.replica.poll()
    task = await gateways.start(1, 3)
    await gateways.finish_all()
    assert (await task).status_code == 200


async def test_a_client_that_leaves_frees_its_places(gateways: Gateways) -> None:
    task = await gateways.start(0, 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: gateways.cell.core.snapshot(0.0).totals["aborted"] == 3)
    await gateways.replica.poll()
    task = await gateways.start(1, 3)
    await gateways.finish_all()
    assert (await task).status_code == 200


async def test_jobs_take_no_places(gateways: Gateways) -> None:
    jobs = [
        asyncio.create_task(gateways.call(0, 3, **{"Idempotency-Key": f"k{index}"}))
        for index in range(2)
    ]
    while len(gateways.replica.leases) < 4:
        await gateways.replica.poll()
        await asyncio.sleep(0)
    attached = asyncio.create_task(gateways.call(1, 3))
    working = asyncio.create_task(gateways.replica.work())
    assert (await attached).status_code == 200
    assert [(await job).status_code for job in jobs] == [200, 200]
    working.cancel()


def test_a_limit_below_one_call_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_attached_images_per_client 4 is below"):
        load_config({"pools": POOLS, "limits": {"max_attached_images_per_client": 4}})
