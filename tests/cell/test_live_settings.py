"""What the dispatcher says of settings that are not in force, and how it takes new ones."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ray_cluster.cell.front import core_of
from ray_cluster.cell.live_settings import NO_KEY, LiveSettings
from ray_cluster.config.loading import ClusterConfig, load_config
from ray_cluster.config.sections.keys import ApiKey, key_digest
from ray_cluster.config.settings import Settings, settings_of
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.config.slices import FrontArguments, front_arguments, registered, worker_arguments
from ray_cluster.dispatch.settings_in_force import SettingsWatch
from ray_cluster.errors import ConfigError
from tests.fakes import registration
from tests.jobs.jobs_cell import until
from tests.keys import FakeSavedKeys, entry

POOL = {"name": "p", "model": "shapes-sd"}
STORAGE = {"jobs": "sqlite:////jobs.db", "results": "/results", "states": "/states"}


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the file more often than once a second, and believe it sooner."""
    monkeypatch.setattr(SettingsWatch.__init__, "__defaults__", (0.05,))
    monkeypatch.setattr("ray_cluster.dispatch.settings_in_force._SETTLED_S", 0.02)


def content(**sections: Any) -> dict[str, Any]:
    return {"storage": STORAGE, "pools": [POOL], **sections}


class Cell:
    """Live settings of a file, with one replica of the pool "p"."""

    def __init__(self, path: Path, saved: FakeSavedKeys | None = None, **http: Any) -> None:
        self.path = path
        self.write(http=http)
        config = load_config(path)
        self.core = core_of(config)
        self.register("p", config)
        self.applied: list[Settings] = []
        arguments: FrontArguments = front_arguments(config, path)
        file = SettingsFile(path)
        keys = saved or FakeSavedKeys()
        self.live = LiveSettings(arguments, config, file, self.core, time.monotonic, keys)

    def register(self, pool: str, config: ClusterConfig) -> None:
        arguments = registered(worker_arguments(config, "p").own)
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


OPEN_HOST: dict[str, Any] = {"host": "0.0.0.0"}


async def test_a_change_that_removes_the_last_key_is_refused(tmp_path: Path) -> None:
    cell = Cell(tmp_path / "my.yaml", **OPEN_HOST, api_keys=["one"])
    await cell.live.start(cell.applied.append)
    before = cell.path.read_text()
    version = cell.live.report().version
    for http in (OPEN_HOST, {**OPEN_HOST, "api_keys": []}, {}):
        with pytest.raises(ConfigError, match=r"last API key is gone.*set http\.open: true"):
            await cell.live.write(yaml.safe_dump(content(http=http, limits={"max_body_s": 9.0})))
        assert cell.path.read_text() == before, "the next dispatcher starts with it"
    # by hand, in its place
    cell.write(http=OPEN_HOST)
    await until(lambda: "the last API key is gone" in "".join(cell.live.warnings()))
    assert cell.live.report().version == version
    assert [len(one.api_keys) for one in cell.applied] == [1]
    # another key in its place is no loss
    await cell.live.write(yaml.safe_dump(content(http={**OPEN_HOST, "api_keys": ["two"]})))
    assert cell.live.warnings() == ()
    await cell.live.write(yaml.safe_dump(content(http={**OPEN_HOST, "open": True})))
    [warning] = cell.live.warnings()
    assert warning.startswith("anybody who reaches 0.0.0.0:8000 may call")
    assert cell.applied[-1].api_keys == ()
    # there is none to lose any more
    await cell.live.write(yaml.safe_dump(content(http=OPEN_HOST)))


async def test_what_never_had_a_key_stays_open(tmp_path: Path) -> None:
    cell = Cell(tmp_path / "my.yaml")
    await cell.live.start(cell.applied.append)
    await cell.live.write(yaml.safe_dump(content(limits={"max_queued_images": 7})))
    assert [one.api_keys for one in cell.applied] == [(), ()]
    assert cell.live.warnings() == ()


async def test_a_service_that_is_started_without_its_keys_keeps_them(tmp_path: Path) -> None:
    saved = FakeSavedKeys()
    first = Cell(tmp_path / "my.yaml", saved, api_keys=["one", entry("ci", "two", "operate")])
    await first.live.start(first.applied.append)
    await until(lambda: saved.keys == first.applied[-1].api_keys)
    # as after the end of a process that had refused this very file
    second = Cell(tmp_path / "my.yaml", saved)
    await second.live.start(second.applied.append)
    assert second.applied[-1].api_keys == first.applied[-1].api_keys
    assert second.live.warnings() == (NO_KEY,)
    # written again as it is, it is no change; and a change of something else is one
    second.path.write_text(f"# as before\n{second.path.read_text()}")
    assert await second.live.write(second.path.read_text()) == second.applied[-1].version
    with pytest.raises(ConfigError, match="the last API key is gone"):
        await second.live.write(yaml.safe_dump(content(limits={"max_queued_images": 7})))
    await second.live.write(yaml.safe_dump(content(http={"api_keys": ["three"]})))
    assert second.live.warnings() == ()
    await until(lambda: saved.keys == second.applied[-1].api_keys)
    assert [one.client for one in saved.keys] == [key_digest("three")]


async def test_open_is_kept_over_a_restart_and_forgets_the_keys(tmp_path: Path) -> None:
    saved = FakeSavedKeys(ApiKey.plain("one"))
    first = Cell(tmp_path / "my.yaml", saved, open=True)
    await first.live.start(first.applied.append)
    assert first.applied[-1].api_keys == ()
    await until(lambda: saved.keys == ())
    second = Cell(tmp_path / "my.yaml", saved)
    await second.live.start(second.applied.append)
    assert second.applied[-1].api_keys == ()
    # beside keys it changes nothing
    third = Cell(tmp_path / "my.yaml", saved, open=True, api_keys=["one"])
    await third.live.start(third.applied.append)
    assert len(third.applied[-1].api_keys) == 1


async def test_a_key_of_the_deployment_cannot_get_a_name_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CLUSTER_API_KEYS", "one")
    cell = Cell(tmp_path / "my.yaml")
    # where the dispatcher runs, the file's reader has no such variable
    monkeypatch.delenv("RAY_CLUSTER_API_KEYS")
    await cell.live.start(cell.applied.append)
    # the file has no key of its own, and needs none
    await cell.live.write(yaml.safe_dump(content(limits={"max_queued_images": 7})))
    named = content(http={"api_keys": [entry("ci", "one", "operate")]})
    with pytest.raises(ConfigError, match="are the same key"):
        await cell.live.write(yaml.safe_dump(named))
    cell.path.write_text(yaml.safe_dump(named))
    await until(lambda: "are the same key" in "".join(cell.live.warnings()))
    assert cell.live.is_healthy
    assert [one.client for one in cell.applied[-1].api_keys] == [key_digest("one")]


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


async def test_a_file_saved_by_hand_changes_nothing_that_calls_are_checked_with_and_replicas_lack(
    tmp_path: Path,
) -> None:
    cell = Cell(tmp_path / "my.yaml")
    await cell.live.start(cell.applied.append)
    for pools, upscalers, named in (
        ([POOL | {"served_as": "m"}], [], "pool p served_as (None runs, the file has m)"),
        ([POOL | {"name": "q"}], [{"name": "p"}], "upscaler p (a worker of another kind has"),
    ):
        cell.write(pools=pools, upscalers=upscalers, limits={"max_queued_images": 7})
        await until(lambda named=named: named in "".join(cell.live.warnings()))  # type: ignore[misc]
        assert cell.live.warnings()[0].startswith("the settings were refused, the earlier ones")
        assert len(cell.applied) == 1
    # once they are gone, it does
    cell.core.unregister("p", 1.0)
    await cell.looked()
    assert [one.limits.max_queued_images for one in cell.applied] == [500, 7]


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
    core = core_of(config)
    arguments, keys = front_arguments(config), FakeSavedKeys()
    live = LiveSettings(arguments, config, None, core, time.monotonic, keys)
    applied: list[Settings] = []
    await live.start(applied.append)
    assert [one.version for one in applied] == [live.report().version]
    with pytest.raises(ConfigError, match="started without a configuration file"):
        await live.write("pools: []")
