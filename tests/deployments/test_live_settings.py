"""What the dispatcher says of settings that are not in force, and how it takes new ones."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_cluster.config.arguments import FrontArguments, front_arguments, worker_arguments
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.deployments.live_settings import LiveSettings
from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.errors import ConfigError
from tests.fakes import registration
from tests.jobs.cell import until

POOL = {"name": "p", "model": "shapes-sd"}
STORAGE = {"jobs": "sqlite:////jobs.db", "results": "/results", "states": "/states"}


def content(**sections: Any) -> dict[str, Any]:
    return {"storage": STORAGE, "pools": [POOL], **sections}


class Cell:
    """Live settings of a file, with one replica of the pool "p"."""

    def __init__(self, path: Path, **http: Any) -> None:
        self.path = path
        self.write(http=http)
        config = load_config(path)
        self.core = DispatchCore(config=config.dispatch, limits=config.limits, epoch=1)
        self.register("p", config)
        self.applied: list[Settings] = []
        arguments: FrontArguments = front_arguments(config, path)
        file = SettingsFile(path)
        self.live = LiveSettings(arguments, config, file, self.core, time.monotonic)

    def register(self, pool: str, config: ClusterConfig) -> None:
        arguments = worker_arguments(config, "p").pool.model_dump_json()
        self.core.register(replace(registration(pool), pool=pool, arguments=arguments), 0.0)

    async def looked(self) -> None:
        """Wait until the watch has seen the file as it is."""
        wanted = settings_of(load_config(self.path)).version
        await until(lambda: self.live.report().version == wanted)

    def write(self, **sections: Any) -> str:
        text = yaml.safe_dump(content(**sections))
        self.path.write_text(text)
        return text


async def test_what_is_written_is_in_force_and_reported(tmp_path: Path) -> None:
    cell = Cell(tmp_path / "my.yaml")
    await cell.live.start(cell.applied.append)
    text = yaml.safe_dump(content(limits={"max_queued_images": 7}))
    version = await cell.live.write(text)
    assert cell.applied[-1].limits.max_queued_images == 7
    assert cell.path.read_text() == text
    report = cell.live.report()
    assert report.version == version == cell.applied[-1].version
    assert [one.pool for one in report.replicas] == ["p"]
    assert report.workers["p"].model == "shapes-sd"
    with pytest.raises(ConfigError, match="there is no such key"):
        await cell.live.write("poolz: []")
    assert cell.live.report().version == version
    assert cell.live.warnings() == ()


async def test_what_is_not_in_force_is_said(tmp_path: Path) -> None:
    cell = Cell(tmp_path / "my.yaml")
    await cell.live.start(cell.applied.append)
    cell.register("left over", load_config(cell.path))
    text = yaml.safe_dump(content(logs={"level": "debug"}, pools=[POOL | {"num_threads": 2}]))
    await cell.live.write(text)
    redeploy, left_over = cell.live.warnings()
    assert "front logs.level (info runs, the file has debug)" in redeploy
    assert "pool p num_threads (1 runs, the file has 2)" in redeploy
    assert left_over == "pool left over runs, but is not in the settings"


async def test_a_service_that_loses_its_last_key_says_so(tmp_path: Path) -> None:
    cell = Cell(tmp_path / "my.yaml", host="0.0.0.0", api_keys=["one"])
    await cell.live.start(cell.applied.append)
    assert cell.live.warnings() == ()
    await cell.live.write(yaml.safe_dump(content(http={"host": "0.0.0.0"})))
    [warning] = cell.live.warnings()
    assert warning.startswith("anybody who reaches 0.0.0.0:8000 may call")


async def test_of_a_refused_file_only_the_reason_is_said(tmp_path: Path) -> None:
    cell = Cell(tmp_path / "my.yaml")
    await cell.live.start(cell.applied.append)
    await cell.live.write(yaml.safe_dump(content(logs={"level": "debug"})))
    assert "needs a redeploy" in cell.live.warnings()[0]
    text = cell.write(logs={"level": "debug"}, poolz=[])
    with pytest.raises(ConfigError, match="no such key"):
        await cell.live.write(text)
    [warning] = cell.live.warnings()
    assert "the settings were refused" in warning
    assert "redeploy" not in warning


async def test_a_pool_that_an_edit_adds_is_said_not_to_be_deployed(tmp_path: Path) -> None:
    cell = Cell(tmp_path / "my.yaml")
    await cell.live.start(cell.applied.append)
    draft, twin = {"name": "draft", "model": "shapes-sd"}, POOL | {"name": "q", "served_as": "p"}
    text = cell.write(pools=[POOL, draft, twin])
    await cell.looked()
    missing = [f"pool {name} is in the settings but not deployed" for name in ("draft", "q")]
    found = cell.live.warnings()
    assert [one.partition(":")[0] for one in found] == missing
    assert found[0].endswith("run 'ray-cluster settings apply FILE'")
    assert cell.live.undeployed() == ("draft",), "the other pool makes the model of q"
    # one is deployed by other means: its replica asks for its settings while it loads
    cell.core.worker_settings("draft")
    assert cell.live.undeployed() == ()
    # the other by 'settings apply' of the same file
    await cell.live.write(text)
    assert cell.live.warnings() == ()
    # out and in again
    cell.write()
    await cell.looked()
    cell.write(pools=[POOL, draft])
    await cell.looked()
    assert cell.live.undeployed() == ("draft",)


async def test_a_pool_without_an_application_is_not_deployed_until_a_replica_starts(
    tmp_path: Path,
) -> None:
    cell = Cell(tmp_path / "my.yaml")
    await cell.live.start(cell.applied.append)
    await cell.live.write(yaml.safe_dump(content(pools=[POOL, {"name": "q", "model": "x/y"}])))
    # its replica asked for its settings, and then its model could not be loaded
    cell.core.worker_settings("q")
    cell.live.note_undeployed(("q",))
    assert cell.live.undeployed() == ("q",)
    assert "pool q is in the settings but not deployed" in cell.live.warnings()[0]
    cell.core.worker_settings("q")
    assert cell.live.undeployed() == ()


async def test_settings_in_force_are_logged_with_their_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cell = Cell(tmp_path / "my.yaml")
    with caplog.at_level(logging.INFO, "ray_cluster"):
        await cell.live.start(cell.applied.append)
        await cell.live.write(yaml.safe_dump(content(limits={"max_queued_images": 7})))
        with pytest.raises(ConfigError):
            await cell.live.write("poolz: []")
    assert [record.message for record in caplog.records] == ["settings_applied"] * 2
    versions = [vars(record)["ray_cluster_fields"]["version"] for record in caplog.records]
    assert versions == [one.version for one in cell.applied]


async def test_without_a_file_settings_stay(tmp_path: Path) -> None:
    config = load_config(content())
    core = DispatchCore(config=config.dispatch, limits=config.limits, epoch=1)
    live = LiveSettings(front_arguments(config), config, None, core, time.monotonic)
    applied: list[Settings] = []
    await live.start(applied.append)
    assert [one.version for one in applied] == [live.report().version]
    with pytest.raises(ConfigError, match="started without a configuration file"):
        await live.write("pools: []")
