"""A replica whose node has no store fetches for itself, within bounds, and says what failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ray_cluster.errors import RequestFailed
from ray_cluster.protocol.leases import Fence, Lease
from ray_cluster.replica.denoise.lora_shelf import LoraShelf
from ray_cluster.replica.lora_store.folder import LoraFolder
from ray_cluster.requests import AddOns, LoraUse
from tests.fakes import image_request
from tests.replica.lora_files import Converter, arguments, order, write_variant

# in one worker: they share a process that converts, whose imports take seconds
pytestmark = pytest.mark.xdist_group("LoRAs of a node")


def opened(_model: Any, files: Sequence[tuple[Path, float]]) -> Any:
    """What stands for bound factors: the names of their files."""
    return SimpleNamespace(num_bytes=1, names=[path.stem for path, _ in files])


def lease(lora_id: str, source: Path | str) -> Lease:
    uses = (LoraUse(f"name-{lora_id}", 1.0, lora_id),)
    request = replace(image_request(f"r-{lora_id}"), add_ons=AddOns(loras=uses))
    return Lease(Fence(1, 1), request, 60.0, 0.0, loras=(order(lora_id, source),))


async def test_a_replica_fetches_for_itself_and_the_longest_unused_go(
    tmp_path: Path, converter: Converter
) -> None:
    sources = {name: write_variant(tmp_path / f"{name}.safetensors", n) for n, name in _NUMBERED}
    # of less than two of them
    given = arguments(tmp_path, sources=(str(tmp_path),), max_disk_bytes=1 << 20)
    folder = LoraFolder(given)
    converter.lend(folder._processes)
    shelf = LoraShelf(SimpleNamespace(), folder, max_bytes=100, open_set=opened)  # type: ignore[arg-type]
    try:
        for name, source in sources.items():
            adapters: Any = await shelf.adapters(lease(name, source))
            assert adapters.names == [name]
        facts = folder.facts()
        assert "c" in facts
        total = sum(one.num_bytes for one in facts.values())
        assert total <= given.max_disk_bytes or list(facts) == ["c"]
        assert len(facts) < len(sources)
    finally:
        converter.take_back(folder._processes)
        await asyncio.to_thread(folder.close)


_NUMBERED = list(enumerate("abc"))


async def test_a_lora_that_cannot_be_had_fails_its_request_with_the_reason(tmp_path: Path) -> None:
    folder = LoraFolder(arguments(tmp_path))
    shelf = LoraShelf(SimpleNamespace(), folder, max_bytes=100, open_set=opened)  # type: ignore[arg-type]
    try:
        for source, words in (
            (tmp_path / "files" / "missing.safetensors", "No such file"),
            ("/etc/a.safetensors", "is not allowed"),
        ):
            with pytest.raises(RequestFailed, match=words):
                await shelf.adapters(lease("a", source))
    finally:
        await asyncio.to_thread(folder.close)
