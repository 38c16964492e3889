"""The folder of LoRAs of a node: what gets in, what does not, and what is left when it ends."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.engine.adapters.factors import open_factors
from ray_cluster.engine.adapters.lora_files import read_lora
from ray_cluster.models.builtin import weights_folder
from ray_cluster.protocol.loras import FailureKind
from ray_cluster.replica.lora_store.folder import LoraFolder, LoraUnavailable
from tests.replica.lora_files import (
    PASTEL,
    Converter,
    arguments,
    opened,
    order,
    parts,
    write_variant,
)
from tests.replica.setup import until

# in one worker: they share a process that converts, whose imports take seconds
pytestmark = pytest.mark.xdist_group("LoRAs of a node")

DIGEST = hashlib.sha256(PASTEL.read_bytes()).hexdigest()


def children(converter: Converter) -> set[int]:
    """Ids of the processes of LoRAs that this one has, without the one that is lent.

    Tests before these may have left others.
    """
    lists = Path("/proc/self/task").glob("*/children")
    found = {int(one) for path in lists for one in path.read_text().split()}
    return {one for one in found - converter.pids if b"replica.lora_" in _command(one)}


def _command(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


async def test_pefts_own_folder_has_the_strength_that_it_says(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    saved = tmp_path / "files" / "peft"
    saved.mkdir()
    plain = {one: torch.ones(shape) for one, shape in peft_shapes().items()}
    save_file(plain, saved / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "target_modules": ["to_q"]}
    (saved / "adapter_config.json").write_text(json.dumps(said))
    async with opened(given, converter) as folder:
        await folder.ensure(order("a", saved))
        path = folder.path_of("a")
        assert path is not None
        for one in open_factors(path).by_component["unet"].values():
            assert torch.allclose(one.expand @ one.shrink, torch.full((1,), 2 * 6.0 / 2))
        assert not parts(given)
        (saved / "adapter_config.json").unlink()
        with pytest.raises(LoraUnavailable, match=r"no adapter_config\.json beside it"):
            await folder.ensure(order("b", saved))
        assert not parts(given)


def peft_shapes() -> dict[str, tuple[int, int]]:
    """Return shapes of factors of rank 2 for the queries of ``shapes-sd``, by PEFT's own keys."""
    weights = weights_folder() / "shapes-sd" / "unet" / "diffusion_pytorch_model.safetensors"
    found = {}
    for name, one in load_file(weights).items():
        if name.endswith(".to_q.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            found[f"{stem}.lora_A.weight"] = (2, one.shape[1])
            found[f"{stem}.lora_B.weight"] = (one.shape[0], 2)
    return found


async def test_a_lora_comes_verified_and_converted_and_the_second_time_at_once(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    async with opened(given, converter) as folder:
        assert folder.path_of("a") is None
        facts = await folder.ensure(order("a", sha256=DIGEST))
        path = folder.path_of("a")
        assert path is not None
        wanted, found = read_lora(PASTEL, weights_folder() / "shapes-sd"), open_factors(path)
        assert facts.sha256 == DIGEST
        assert facts.num_bytes == wanted.num_bytes == found.num_bytes
        assert facts.ranks == wanted.ranks
        assert facts.num_layers == len(wanted.by_component["unet"])
        for layer, one in wanted.by_component["unet"].items():
            same = found.by_component["unet"][layer]
            assert torch.equal(one.shrink, same.shrink)
            assert torch.equal(one.expand, same.expand)
        assert not parts(given)
        before = path.stat().st_ino
    # another process, to which this one's files are what an earlier one left
    async with opened(given, converter) as folder:
        assert folder.facts() == {"a": facts}
        assert await folder.ensure(order("a", "builtin:nothing")) == facts
        assert path.stat().st_ino == before


def _bad_files(root: Path) -> dict[str, tuple[str | Path, str, FailureKind]]:
    """Return sources by id, with what is said of them and whether that is for ever."""
    files = root / "files"
    whole = PASTEL.read_bytes()
    (files / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    (files / "empty.safetensors").write_bytes(b"")
    (files / "pickle.safetensors").write_bytes(pickle.dumps({"lora": [1.0] * 1000}))
    (files / "pickle.bin").write_bytes(pickle.dumps({"lora": [1.0] * 1000}))
    (files / "lies.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    tensors = load_file(PASTEL)
    first = next(iter(tensors))
    save_file(tensors | {first: tensors[first] * float("nan")}, files / "nan.safetensors")
    save_file({"weight": torch.zeros(4, 4)}, files / "other.safetensors")
    wide = {name: torch.zeros(one.shape[0] * 2, one.shape[1] * 2) for name, one in tensors.items()}
    save_file(wide, files / "wide.safetensors")
    (files / "outside.safetensors").symlink_to("/etc/hostname")
    (files / "large.safetensors").touch()
    os.truncate(files / "large.safetensors", 64 << 30)
    return {
        "cut": (files / "cut.safetensors", "cannot be read as safetensors", "invalid"),
        "empty": (files / "empty.safetensors", "cannot be read as safetensors", "invalid"),
        "pickled": (files / "pickle.safetensors", "cannot be read as safetensors", "invalid"),
        "binary": (files / "pickle.bin", "hold programs", "invalid"),
        "lies": (files / "lies.safetensors", "cannot be read as safetensors", "invalid"),
        "nan": (files / "nan.safetensors", "NaN", "invalid"),
        "other": (files / "other.safetensors", "no LoRA keys", "invalid"),
        "wide": (files / "wide.safetensors", "of its factors are of other sizes", "invalid"),
        "outside": (files / "outside.safetensors", "leads out of it", "invalid"),
        "escaping": (f"{files}/../secret.safetensors", "leads out of it", "invalid"),
        "large": (files / "large.safetensors", "larger than", "invalid"),
        "missing": (files / "missing.safetensors", "No such file", "unreachable"),
        "builtin": ("builtin:shapes-sd", "outline, pastel, texture", "invalid"),
    }


async def test_files_that_will_never_do_are_named_and_leave_nothing(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path, max_file_bytes=32 << 20)
    cases = _bad_files(tmp_path)
    async with opened(given, converter) as folder:
        for lora_id, (source, words, failure) in cases.items():
            with pytest.raises(LoraUnavailable, match=words) as error:
                await folder.ensure(order(lora_id, source))
            assert error.value.failure == failure, lora_id
            assert str(tmp_path / "loras") not in error.value.reason
        with pytest.raises(LoraUnavailable, match=f"its digest is {DIGEST}") as error:
            await folder.ensure(order("digest", sha256="0" * 64))
        assert error.value.failure == "invalid"
        with pytest.raises(LoraUnavailable, match="made for another model") as error:
            await folder.ensure(order("base", base_model="shapes-sd3"))
        assert error.value.failure == "invalid"
        # the node lacks the model: the file may be right
        with pytest.raises(LoraUnavailable, match="base model cannot be read") as error:
            await folder.ensure(order("nobase", base_model=str(tmp_path / "nothing")))
        assert error.value.failure == "unreachable"
        assert not parts(given)
        assert folder.facts() == {}
        # a failure is not remembered here
        write_variant(tmp_path / "files" / "missing.safetensors", 0)
        await folder.ensure(order("missing", cases["missing"][0]))
        assert list(folder.facts()) == ["missing"]


async def test_sources_that_hang_hold_up_no_other(tmp_path: Path, converter: Converter) -> None:
    given = arguments(tmp_path, fetch_timeout_s=3600.0)
    pipes = [tmp_path / "files" / f"pipe{n}.safetensors" for n in range(10)]
    for pipe in pipes:
        os.mkfifo(pipe)
    async with opened(given, converter) as folder:
        before = children(converter)
        # more than the event loop has threads for
        hanging = [
            asyncio.create_task(folder.ensure(order(f"pipe{n}", pipe)))
            for n, pipe in enumerate(pipes)
        ]
        await until(lambda: len(children(converter) - before) >= len(pipes))
        await folder.ensure(order("a"))
        assert not any(task.done() for task in hanging)
        for task in hanging:
            task.cancel()
        await asyncio.wait(hanging)
        assert not parts(given)
    await until(lambda: not children(converter))


async def test_a_source_that_hangs_ends_with_its_reader_and_its_lock_is_free(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path, fetch_timeout_s=0.5)
    pipe = tmp_path / "files" / "pipe.safetensors"
    os.mkfifo(pipe)
    async with opened(given) as folder:
        for _ in range(2):
            with pytest.raises(LoraUnavailable, match=r"within 0\.5 s") as error:
                await folder.ensure(order("a", pipe))
            assert error.value.failure == "unreachable"
            await until(lambda: not children(converter))
    assert not parts(given)


async def test_a_fetch_that_is_cancelled_ends_its_process_at_once(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path, fetch_timeout_s=3600.0)
    pipe = tmp_path / "files" / "pipe.safetensors"
    os.mkfifo(pipe)
    async with opened(given) as folder:
        task = asyncio.create_task(folder.ensure(order("a", pipe)))
        await until(lambda: children(converter))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not children(converter))
        # and its lock is free
        with pytest.raises(LoraUnavailable, match="No such file"):
            await folder.ensure(order("a", tmp_path / "files" / "missing.safetensors"))


async def test_a_killed_reader_fails_one_fetch_and_the_next_has_another(
    tmp_path: Path, converter: Converter
) -> None:
    pipe = tmp_path / "pipe.safetensors"
    given = arguments(tmp_path, sources=("builtin:", str(tmp_path)))
    os.mkfifo(pipe)
    async with opened(given, converter) as folder:
        before = children(converter)
        task = asyncio.create_task(folder.ensure(order("a", pipe)))
        await until(lambda: children(converter) - before)
        (reader,) = children(converter) - before
        os.kill(reader, signal.SIGKILL)
        with pytest.raises(LoraUnavailable, match="ended its reader") as error:
            await task
        assert error.value.failure == "unreachable"
        await until(lambda: children(converter) == before)
        await folder.ensure(order("a"))


@pytest.mark.slow
async def test_a_killed_converter_fails_one_fetch_and_the_next_has_another(
    tmp_path: Path, converter: Converter
) -> None:
    async with opened(arguments(tmp_path)) as folder:
        folder.warm_up()
        await until(lambda: children(converter))
        (process,) = children(converter)
        os.kill(process, signal.SIGKILL)
        with pytest.raises(LoraUnavailable, match="converts it ended") as error:
            await folder.ensure(order("a"))
        assert error.value.failure == "unreachable"
        await folder.ensure(order("a"))


async def test_two_processes_of_a_node_never_fetch_the_same_twice(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    pipe = tmp_path / "files" / "pipe.safetensors"
    os.mkfifo(pipe)
    async with opened(given, converter) as one, opened(given) as other:
        tasks = [asyncio.create_task(each.ensure(order("a", pipe))) for each in (one, other)]
        await until(lambda: children(converter))
        # a pipe gives its bytes once: a second reader would wait for more
        await asyncio.to_thread(pipe.write_bytes, PASTEL.read_bytes())
        first, second = await asyncio.gather(*tasks)
        assert first == second
        assert first.sha256 == DIGEST


async def test_the_lock_of_a_dead_process_is_free_and_what_it_left_is_removed(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    pipe = tmp_path / "files" / "pipe.safetensors"
    os.mkfifo(pipe)
    code = f"""
import asyncio
from tests.replica.lora_files import order
from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.replica.lora_store.folder import LoraFolder
folder = LoraFolder(LorasConfig.model_validate_json({given.model_dump_json()!r}))
folder.prepare()
asyncio.run(folder.ensure(order("a", {str(pipe)!r})))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:  # noqa: ASYNC220
        # opens once the other process's reader does
        writing = await asyncio.to_thread(os.open, pipe, os.O_WRONLY)
        try:
            os.write(writing, PASTEL.read_bytes()[:4096])
            await until(lambda: parts(given) and (Path(given.folder) / "parts").is_dir())
            async with opened(given, converter):
                # at work: not removed
                assert len(parts(given)) == 1
            process.kill()
            process.wait()
            async with opened(given, converter) as folder:
                assert not parts(given)
                await folder.ensure(order("a"))
            # the reader has ended with its parent: a pipe without readers breaks
            await until(lambda: _is_broken(writing))
        finally:
            os.close(writing)


def _is_broken(pipe: int) -> bool:
    try:
        os.write(pipe, b"more")
    except BrokenPipeError:
        return True
    return False


async def test_the_longest_unused_go_and_never_what_is_to_stay(
    tmp_path: Path, converter: Converter
) -> None:
    sources = {name: write_variant(tmp_path / f"{name}.safetensors", n) for n, name in _NUMBERED}
    given = arguments(tmp_path, sources=(str(tmp_path),), max_disk_bytes=1 << 20)
    async with opened(given, converter) as folder:
        for name, source in sources.items():
            facts = await folder.ensure(order(name, source))
        size = facts.num_bytes
        # with room for two of them
        small = LoraFolder(given.model_copy(update={"max_disk_bytes": int(2.5 * size)}))
        _set_used(given, ["b", "c", "d", "a"])
        assert small.path_of("b") is not None
        assert small.evict({"d"}) == ["c", "a"]
        assert sorted(small.facts()) == ["b", "d"]
        assert small.evict(()) == []
        assert 2 * size < small.num_bytes < 2.5 * size
        # everything is ordered: above the bound rather than without what is needed
        full = LoraFolder(given.model_copy(update={"max_disk_bytes": 1}))
        assert full.evict({"b", "d"}) == []
        assert full.evict({"b"}) == ["d"]


_NUMBERED = list(enumerate("abcd"))


def _set_used(given: LorasConfig, lora_ids: Sequence[str]) -> None:
    now_s = time.time()
    for number, lora_id in enumerate(lora_ids):
        at_s = now_s - 1000 + number
        os.utime(Path(given.folder) / f"{lora_id}.safetensors", (at_s, at_s))


async def test_a_folder_that_cannot_be_written_is_said_and_may_be_mended(tmp_path: Path) -> None:
    given = arguments(tmp_path)
    (tmp_path / "loras").touch()
    folder = LoraFolder(given)
    with pytest.raises(LoraUnavailable, match="in the folder of LoRAs") as error:
        await folder.ensure(order("a"))
    assert error.value.failure == "unreachable"
    folder.close()


async def test_a_replica_without_a_store_needs_no_preparation(
    tmp_path: Path, converter: Converter
) -> None:
    folder = LoraFolder(arguments(tmp_path))
    converter.lend(folder._processes)
    try:
        await folder.ensure(order("a"))
        assert folder.path_of("a") is not None
    finally:
        converter.take_back(folder._processes)
        await asyncio.to_thread(folder.close)


async def test_one_waits_for_the_lock_that_another_holds(
    tmp_path: Path, converter: Converter
) -> None:
    given = arguments(tmp_path)
    async with opened(given, converter) as folder:
        number = os.open(Path(given.folder) / "a.lock", os.O_CREAT | os.O_RDWR)
        fcntl.flock(number, fcntl.LOCK_EX)
        task = asyncio.create_task(folder.ensure(order("a")))
        await folder.ensure(order("b"))
        assert not task.done()
        os.close(number)
        await task
