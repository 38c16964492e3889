"""A replica goes by the settings that come with the answers to its polls, and says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ray_cluster.cell.worker import first_settings
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.config.sections.pools import PoolConfig
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.config.slices import WorkerArguments
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.imaging.processes.image_coder import ImageCoder
from ray_cluster.protocol.settings import Capacity, WorkerSettings
from ray_cluster.replica import retries
from ray_cluster.replica.denoise import builder
from tests.engine.staged import StagedModel
from tests.replica.setup import CONFIG, REQUESTS, check_image, offer, outcomes, serving, until


def settings(**pool: Any) -> Settings:
    content = {
        "dispatch": CONFIG.model_dump() | {"poll_s": 0.2},
        "pools": [{"name": "p", "model": "x", **pool}],
    }
    return settings_of(ClusterConfig.model_validate(content))


async def test_a_replica_at_work_follows_the_caps_within_its_memory(
    model: StagedModel, pixels: dict[str, Any], coder: ImageCoder
) -> None:
    async with serving(model, coder, "one") as (link, [worker]):
        await until(lambda: link.epochs)
        await offer(link.service, REQUESTS)

        async def applied(wanted: Settings) -> Capacity | None:
            link.service.apply(wanted)
            await until(lambda: link.last_poll["one"].settings_version == wanted.version)
            return link.last_poll["one"].capacity

        assert await applied(settings(max_batch=1, max_in_flight=2)) == Capacity(2, 1)
        assert link.last_poll["one"].num_free <= 2
        # memory was planned for four
        assert await applied(settings(max_batch=9, max_in_flight=12)) == Capacity(12, 4)
        for outcome in (await outcomes(link.service, REQUESTS)).values():
            check_image(outcome, pixels)
        [row] = (await link.service.snapshot()).replicas
        assert (row.max_batch, row.max_in_flight) == (4, 12)
        worker.check_alive()


def test_a_model_is_loaded_by_arguments_and_settings_together() -> None:
    pool = PoolConfig(name="p", model="x", num_threads=3)
    arguments = WorkerArguments(kind="denoise", name="p", pools=(pool,))
    live = {"max_batch": 2, "max_in_flight": 5, "defaults": {"size": "64x96", "sampler": "ddim"}}
    given = WorkerSettings("v", 2, 5, 1.0, json.dumps(live))
    started = builder.started_pool(arguments, given)
    assert (started.num_threads, started.max_batch, started.max_in_flight) == (3, 2, 5)
    assert (started.defaults.size, started.defaults.sampler) == ("64x96", "ddim")
    assert builder.started_pool(arguments, None).max_batch == 8


async def test_the_first_settings_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_DISPATCHER_RETRY_S", (0.01,))
    given = WorkerSettings("v", 2, 5, 1.0)

    class Late:
        num_calls = 0

        async def pool_settings(self, pool: str) -> WorkerSettings | None:
            assert pool == "p"
            self.num_calls += 1
            if self.num_calls < 3:
                raise DispatcherUnavailable("not yet")
            return given

    link: Any = Late()
    assert await first_settings(link, "p") is given
