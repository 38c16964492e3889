"""What crashes, full disks and strangers leave in the folder of LoRAs, and what becomes of it."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_cluster.replica.lora_store import processes as lora_processes
from ray_cluster.replica.lora_store.folder import LoraUnavailable
from tests.replica.lora_files import PASTEL, Converter, arguments, opened, order, parts

# in one worker: they share a process that converts, whose imports take seconds
pytestmark = pytest.mark.xdist_group("LoRAs of a node")


async def test_what_a_crash_left_half_written_or_strangers_put_there_is_not_taken_for_a_lora(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    root = Path(given.folder)
    async with opened(given, converter) as folder:
        facts = await folder.ensure(order("a"))
        whole = (root / "a.safetensors").read_bytes()
        for lora_id, facts_text, content in (
            ("cut", (root / "a.json").read_text(), whole[:-1]),
            ("torn", (root / "a.json").read_text()[:-9], whole),
            ("list", "[]", whole),
            ("alone", "", whole),
        ):
            (root / f"{lora_id}.safetensors").write_bytes(content)
            if facts_text:
                (root / f"{lora_id}.json").write_text(facts_text)
        (root / "nofile.json").write_text((root / "a.json").read_text())
        (root / "not an id.safetensors").write_bytes(b"")
        (root / "parts" / ".nfs0001").write_bytes(b"")
        (root / "parts" / "a.0001.safetensors").write_bytes(b"")
    async with opened(given, converter) as folder:
        assert folder.facts() == {"a": facts}
        assert parts(given) == [".nfs0001"]
        assert await folder.ensure(order("cut")) == facts
        _check_same(root / "cut.safetensors", root / "a.safetensors")
        # of the right length, but not to be read
        (root / "a.safetensors").write_bytes(b"x" * len(whole))
        assert await folder.ensure(order("a")) == facts
        folder.discard("a")
        assert folder.path_of("a") is None
        assert await folder.ensure(order("a")) == facts
        _check_same(root / "a.safetensors", root / "cut.safetensors")


def _check_same(one: Path, other: Path) -> None:
    # bytes may differ: the order of metadata is not fixed
    tensors, wanted = load_file(one), load_file(other)
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


@contextlib.contextmanager
def small_files(num_bytes: int) -> Iterator[None]:
    """Let child processes that start meanwhile write no larger files, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
async def test_a_disk_that_is_full_of_what_is_converted_may_have_room_later(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    async with opened(given) as folder:
        with small_files(4096):
            folder.warm_up()
        # of the process that converts, which goes on
        for _ in range(2):
            with pytest.raises(LoraUnavailable, match=r"cannot be written.*too large") as error:
                await folder.ensure(order("a"))
            assert error.value.failure == "unreachable"
            assert not parts(given)
    async with opened(given, converter) as folder:
        await folder.ensure(order("a"))


async def test_a_disk_that_is_full_may_have_room_later(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    async with opened(given) as folder:
        with small_files(4096), pytest.raises(LoraUnavailable, match="File too large") as error:
            await folder.ensure(order("a"))
        assert error.value.failure == "unreachable"
        assert not parts(given)
    async with opened(given, converter) as folder:
        await folder.ensure(order("a"))


async def test_a_converter_killed_in_the_middle_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(tmp_path)
    monkeypatch.setattr(lora_processes, "_CONVERT", ("tests.replica.lora_files", "write_half"))
    async with opened(given) as folder:
        with pytest.raises(LoraUnavailable, match="converts it ended") as error:
            await folder.ensure(order("a"))
        assert error.value.failure == "unreachable"
        assert (tmp_path / "loras" / "half").exists()
        assert not parts(given)
        assert folder.facts() == {}


async def test_reasons_are_of_bounded_length_whatever_a_file_says(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    path = tmp_path / "files" / "names.safetensors"
    save_file(load_file(PASTEL) | {f"unet.{'x' * 100_000}.lora_A.weight": torch.zeros(4, 4)}, path)
    async with opened(given, converter) as folder:
        with pytest.raises(LoraUnavailable) as error:
            await folder.ensure(order("a", path))
    assert error.value.failure == "invalid"
    assert len(error.value.reason) <= 500
