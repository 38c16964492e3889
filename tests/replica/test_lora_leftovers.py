"""What stays on a node's disk of LoRAs that are gone: nothing, in time; and locks hold."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from pathlib import Path

import pytest

from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.replica.lora_store.folder import LoraFolder, LoraUnavailable
from tests.replica.lora_files import Converter, arguments, opened, order, parts

# in one worker: they share a process that converts, whose imports take seconds
pytestmark = pytest.mark.xdist_group("LoRAs of a node")


def _names(given: LorasConfig) -> set[str]:
    return {one.name for one in Path(given.folder).iterdir()} - {"parts"}


async def test_a_lock_leaves_no_file_whether_its_lora_came_or_not(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    async with opened(given, converter) as folder:
        await folder.ensure(order("a"))
        with pytest.raises(LoraUnavailable):
            await folder.ensure(order("b", tmp_path / "files" / "nothing.safetensors"))
        assert _names(given) == {"a.safetensors", "a.json"}
        folder.discard("a")
        assert _names(given) == set()


async def test_what_dead_processes_and_earlier_releases_have_left_goes(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    folder = LoraFolder(given)
    folder.prepare()
    root = Path(given.folder)
    left = ["old.lock", "held.lock", "held.json", "torn.json", "parts/dead.12.safetensors"]
    for name in (
        *left,
        "parts/held.12.safetensors",
        "whole.safetensors",
        "whole.json",
        "README.md",
    ):
        (root / name).write_text("{}")
    held = os.open(root / "held.lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    stays = {"held.lock", "held.json", "whole.safetensors", "whole.json", "README.md"}
    assert folder.evict(()) == []
    assert _names(given) == stays
    assert parts(given) == ["held.12.safetensors"]
    os.close(held)
    folder.prepare()
    assert _names(given) == {"whole.safetensors", "whole.json", "README.md"}
    assert parts(given) == []
    folder.close()


async def test_a_lock_is_held_by_one_however_often_its_file_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a folder of its own, as processes have; and others tidy meanwhile."""
    monkeypatch.setattr("ray_cluster.replica.lora_store.folder._LOCK_WAIT_S", 0.001)
    given = arguments(tmp_path)
    folders = [LoraFolder(given) for _ in range(8)]
    inside, most, turns = 0, 0, 0

    async def work(folder: LoraFolder) -> None:
        nonlocal inside, most, turns
        for _ in range(10):
            async with folder._locked("a"):
                inside, turns = inside + 1, turns + 1
                most = max(most, inside)
                await asyncio.sleep(0)
                folders[0]._remove_leftovers()
                inside -= 1

    await asyncio.gather(*map(work, folders))
    assert (most, turns) == (1, 80)
    assert _names(given) == set()
    for folder in folders:
        folder.close()


async def test_who_waits_for_a_lock_that_is_deleted_waits_for_the_next_one(tmp_path: Path) -> None:
    one, other = (LoraFolder(arguments(tmp_path)) for _ in range(2))
    first = one._lock("a")
    assert first is not None
    waits = os.open(one._path("a", ".lock"), os.O_RDWR)
    one._unlock("a", first)
    second = other._lock("a")
    assert second is not None
    # the file that it has opened is free, and nobody's lock any more
    fcntl.flock(waits, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert one._lock("a") is None
    os.close(waits)
    other._unlock("a", second)
    one.close()
    other.close()


async def test_what_nobody_has_used_for_a_month_goes_unless_it_is_ordered(tmp_path: Path) -> None:
    given, now_s = arguments(tmp_path), time.time()
    folder = LoraFolder(given, lambda: now_s + 31 * 86400)
    folder.prepare()
    for name in ("removed", "ordered", "used"):
        for suffix in (".safetensors", ".json"):
            (Path(given.folder) / f"{name}{suffix}").write_text("{}")
    os.utime(Path(given.folder) / "used.safetensors", (now_s + 86400 * 2, now_s + 86400 * 2))
    assert folder.evict({"ordered"}) == ["removed"]
    assert folder.ids == {"ordered", "used"}
    assert _names(given) == {
        f"{one}{end}" for one in folder.ids for end in (".safetensors", ".json")
    }
    folder.close()


async def test_what_was_removed_goes_though_there_is_room_unless_it_is_ordered(
    tmp_path: Path,
) -> None:
    given = arguments(tmp_path)
    folder = LoraFolder(given)
    folder.prepare()
    for name in ("removed", "ordered", "unused"):
        for suffix in (".safetensors", ".json"):
            (Path(given.folder) / f"{name}{suffix}").write_text("{}")
    assert folder.evict({"ordered"}, {"removed", "ordered", "elsewhere"}) == ["removed"]
    assert folder.ids == {"ordered", "unused"}
    folder.close()
