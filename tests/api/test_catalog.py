"""The catalog of models: no call waits for news of a model that is known already."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

import pytest

from ray_cluster.api.catalog import Catalog
from ray_cluster.api.errors import ApiError
from ray_cluster.config.loading import ClusterConfig
from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.requests import ModelProfile
from tests.api.conftest import shapes_profile
from tests.fakes import FakeClock, FakeDispatcherClient, settings_for


class SlowClient(FakeDispatcherClient):
    """Answers for its models when it is let go."""

    def __init__(self) -> None:
        super().__init__(shapes_profile())
        self.gate = asyncio.Event()

    async def models(self) -> Mapping[str, ModelProfile]:  # type: ignore[override]
        await self.gate.wait()
        return await super().models()


async def test_a_known_model_is_read_anew_behind_the_calls(config: ClusterConfig) -> None:
    client, clock = SlowClient(), FakeClock()
    catalog = Catalog(client, settings_for(config), clock)
    first = asyncio.create_task(catalog.profile("shapes"))
    await asyncio.sleep(0)
    assert not first.done()
    client.gate.set()
    assert (await first).model == "shapes"
    client.gate.clear()
    client.profiles["new"] = client.profiles["shapes"]
    clock.advance(2.0)
    async with asyncio.timeout(1.0):
        await catalog.profile("shapes")
    assert "new" not in catalog.known
    client.gate.set()
    await asyncio.sleep(0.01)
    assert "new" in catalog.known


async def test_a_failed_read_is_logged_and_harms_no_call(
    config: ClusterConfig, caplog: pytest.LogCaptureFixture
) -> None:
    client, clock = FakeDispatcherClient(shapes_profile()), FakeClock()
    catalog = Catalog(client, settings_for(config), clock)
    await catalog.profile("shapes")
    client.down = True
    clock.advance(2.0)
    with caplog.at_level(logging.WARNING):
        assert (await catalog.profile("shapes")).model == "shapes"
        await asyncio.sleep(0.01)
    assert "could not be asked for" in caplog.text
    with pytest.raises(DispatcherUnavailable):
        await catalog.profile("unheard-of")
    client.down = False
    with pytest.raises(ApiError, match="unheard-of"):
        await catalog.profile("unheard-of")


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_model_that_has_a_group_is_offered_without_reuse(
    config: ClusterConfig, ranks: int
) -> None:
    """Of which a group has none, whichever of the model's pools has registered last."""
    pool = config.pools[0]
    other = pool.model_copy(update={"name": "b", "served_as": pool.model_name, "ranks": ranks})
    both = config.model_copy(update={"pools": (pool, other)})
    client = FakeDispatcherClient(replace(shapes_profile(), outer_blocks=(0, 2)))
    profile = await Catalog(client, settings_for(both), FakeClock()).profile("shapes")
    assert profile.outer_blocks == ((0, 2) if ranks == 1 else None)
