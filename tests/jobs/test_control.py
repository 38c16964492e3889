"""The controller's way to the dispatcher, over a job store that outlives it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ray_cluster.codec.values import Codec
from ray_cluster.config.arguments import worker_arguments
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.control import Observation
from ray_cluster.protocol.leases import Registration
from tests.fakes import registration, some_settings
from tests.jobs.cell import JobsCell, until

CONFIG = ClusterConfig.model_validate({"pools": [{"name": "shapes", "model": "shapes-sd"}]})


def worker() -> Registration:
    """A replica of the settings' pool."""
    arguments = worker_arguments(CONFIG, "shapes").pool.model_dump_json()
    return replace(registration(model="shapes"), pool="shapes", load_s=9.0, arguments=arguments)


async def test_a_dispatcher_without_settings_cannot_be_observed(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        with pytest.raises(DispatcherUnavailable, match="starting"):
            await cell.jobs_service.control.observe({})


async def test_a_pool_without_replicas_is_known_after_a_restart(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(some_settings())
        control = cell.jobs_service.control
        assert (await control.observe({})).pools == ()
        await cell.dispatch.register(worker())
        (pool,) = (await control.observe({})).pools
        assert [one.replica_id for one in pool.replicas] == ["r"]
        await until(cell.store.workers)
    async with JobsCell(tmp_path, epoch=2) as cell:
        cell.jobs_service.apply(some_settings())
        (pool,) = (await cell.jobs_service.control.observe({})).pools
        assert (pool.pool, pool.load_s, pool.replicas) == ("shapes", 9.0, ())


async def test_an_observation_travels_as_it_is(tmp_path: Path) -> None:
    async with JobsCell(tmp_path) as cell:
        cell.jobs_service.apply(some_settings())
        await cell.dispatch.register(worker())
        seen = await cell.jobs_service.control.observe({})
    codec: Codec[Observation] = Codec(Observation)
    assert codec.decode(codec.encode(seen)) == seen
