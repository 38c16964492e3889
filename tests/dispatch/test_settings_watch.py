"""Changes of the settings' file are applied; a broken one is refused and the old one stays."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from ray_cluster.config.loading import ClusterConfig, Document
from ray_cluster.config.settings import settings_of
from ray_cluster.config.settings_file import SettingsFile
from ray_cluster.config.slices import parsed
from ray_cluster.dispatch.settings_in_force import SettingsBook, SettingsWatch
from ray_cluster.errors import ConfigError
from tests.fakes import FakeClock, some_settings
from tests.jobs.jobs_cell import until


def text(max_queued: int) -> str:
    return f"limits: {{max_queued_images: {max_queued}}}\npools: [{{name: a, model: shapes-sd}}]\n"


class Watched:
    """A watch, and the bounds of the queue that it has applied."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.applied: list[int] = []
        self.watch = SettingsWatch(SettingsFile(path), self._on_change, every_s=0.02)

    def _on_change(self, config: ClusterConfig) -> None:
        self.applied.append(config.limits.max_queued_images)


async def test_a_change_is_applied_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "my.yaml")
    watched.path.write_text(text(10))
    # as of a front that stands by, which Serve asks before anything else
    assert watched.watch.is_healthy
    await watched.watch.start()
    assert watched.applied == [10]
    watched.path.write_text(text(20))
    await until(lambda: watched.applied == [10, 20])
    await asyncio.sleep(0.1)
    assert watched.applied == [10, 20]
    assert watched.watch.is_healthy
    watched.watch.stop()


@pytest.mark.parametrize("broken", ["limits: {max_queued_images: 0}", "a: [", "", None])
async def test_a_broken_file_is_said_once_and_the_old_one_stays(
    tmp_path: Path, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched(tmp_path / "my.yaml")
    watched.path.write_text(text(10))
    await watched.watch.look()
    if broken is None:
        watched.path.unlink()
    else:
        watched.path.write_text(broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await watched.watch.look()
    assert watched.applied == [10]
    assert "the earlier ones stay in force" in watched.watch.problem
    assert len(caplog.records) == 1
    # the old content again is no change, but no problem either
    watched.path.write_text(text(10))
    await watched.watch.look()
    assert watched.watch.problem == ""


async def test_a_file_that_is_broken_at_the_start_is_an_error(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "my.yaml")
    watched.path.write_text("pools: []")
    with pytest.raises(ConfigError, match="pools: must be a list of at least 1"):
        await watched.watch.start()
    assert watched.applied == []


async def test_a_swapped_config_map_is_followed(tmp_path: Path) -> None:
    for name, bound in (("v1", 10), ("v2", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my.yaml").write_text(text(bound))
    data, new = tmp_path / "..data", tmp_path / "..data_tmp"
    data.symlink_to("v1")
    watched = Watched(tmp_path / "my.yaml")
    watched.path.symlink_to(Path("..data") / "my.yaml")
    await watched.watch.start()
    new.symlink_to("v2")
    new.rename(data)
    await until(lambda: watched.applied == [10, 20])
    watched.watch.stop()


async def test_a_gateway_waits_for_another_version_than_it_has() -> None:
    clock, first = FakeClock(), some_settings()
    book = SettingsBook(first, clock)
    # who stands by serves nobody
    assert await book.wait("g", "", 0.01) is None
    book.put(first)
    news = await book.wait("g", "", 5.0)
    assert news is not None
    assert news.version == first.version
    assert await book.wait("g", first.version, 0.01) is None
    waiting = asyncio.create_task(book.wait("g", first.version, 5.0))
    await asyncio.sleep(0)
    assert book.version_by_gateway() == {"g": first.version}
    second = some_settings(limits={"max_queued_images": 7})
    book.put(second)
    later = await waiting
    assert later is not None
    assert later.version == second.version
    assert parsed(Document, later.document).limits.max_queued_images == 7


async def test_a_gateway_that_is_gone_is_forgotten() -> None:
    clock, settings = FakeClock(), some_settings()
    book = SettingsBook(settings, clock)
    await book.wait("silent", settings.version, 0.01)
    waiting = asyncio.create_task(book.wait("cancelled", settings.version, 5.0))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert set(book.version_by_gateway()) == {"silent"}
    clock.advance(60)
    assert book.version_by_gateway() == {}


def test_equal_settings_have_one_version_however_they_are_written() -> None:
    one = settings_of(ClusterConfig.model_validate({"pools": [{"name": "a", "model": "m"}]}))
    two = settings_of(
        ClusterConfig.model_validate(
            {"limits": {"max_queued_images": 500}, "pools": [{"model": "m", "name": "a"}]}
        )
    )
    assert one.version == two.version


async def test_a_file_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "my.yaml")
    watched.path.write_text(text(10))
    await watched.watch.look()
    # valid, but not yet all of it
    watched.path.write_text("pools: [{name: a, model: shapes-sd}]")
    looking = asyncio.create_task(watched.watch.look())
    await asyncio.sleep(0.05)
    watched.path.write_text(text(20))
    await looking
    assert watched.applied == [10]
    await watched.watch.look()
    assert watched.applied == [10, 20]


async def test_a_change_of_the_file_of_keys_is_applied(tmp_path: Path) -> None:
    path, keys = tmp_path / "my.yaml", tmp_path / "keys.yaml"
    applied: list[list[str | None]] = []
    watch = SettingsWatch(
        SettingsFile(path),
        lambda config: applied.append([key.plain for key in config.http.api_keys]),
        every_s=0.02,
    )
    path.write_text(f"http: {{api_keys_file: {keys}}}\n{text(10)}")
    keys.write_text("api_keys: [one]")
    await watch.start()
    keys.write_text("api_keys: [one, two]")
    await until(lambda: len(applied) == 2)
    keys.unlink()
    await until(lambda: "cannot read the file of API keys" in watch.problem)
    keys.write_text("api_keys: [three]")
    await until(lambda: not watch.problem)
    assert applied == [["one"], ["one", "two"], ["three"]]
    watch.stop()
