"""The LoRAs that a replica has in memory: shared, bounded, and fetched again when a file is bad."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ray_cluster.engine.adapters.adapter_set import AdapterSet
from ray_cluster.engine.adapters.factors import open_factors, write_factors
from ray_cluster.engine.adapters.lora_files import LoraFactors
from ray_cluster.engine.adapters.low_rank import LowRank
from ray_cluster.engine.models.loading import LoadedModel
from ray_cluster.errors import ModelUnsupported, RequestFailed
from ray_cluster.protocol.leases import Fence, Lease
from ray_cluster.protocol.loras import LoraFacts, LoraOrder
from ray_cluster.replica.denoise.lora_shelf import LoraShelf
from ray_cluster.replica.lora_store.folder import LoraUnavailable
from ray_cluster.requests import AddOns, LoraUse
from tests.fakes import image_request
from tests.replica.lora_files import order
from tests.replica.setup import until

MODEL: Any = None
LAYER = LowRank(torch.ones(2, 8), torch.ones(8, 2))
FACTS = LoraFacts("ab" * 32, LAYER.num_bytes, (2,), 1)


class Folder:
    """Writes small files of factors when it is to have them.

    Attributes:
        fetched: ids, in order.
        kept: what each call of ``evict`` was to keep.
        failing: ids that are not to be had.
        evicting: whether what was fetched goes at once, as from a disk that is too small.
        gate: holds fetches up while it is cleared.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fetched: list[str] = []
        self.kept: list[set[str]] = []
        self.failing: set[str] = set()
        self.evicting = False
        self.gate = asyncio.Event()
        self.gate.set()

    def file(self, lora_id: str) -> Path:
        return self.root / f"{lora_id}.safetensors"

    def path_of(self, lora_id: str) -> Path | None:
        return self.file(lora_id) if self.file(lora_id).exists() else None

    def discard(self, lora_id: str) -> None:
        self.file(lora_id).unlink(missing_ok=True)

    async def ensure(self, order: LoraOrder) -> LoraFacts:
        lora_id = order.lora.lora_id
        self.fetched.append(lora_id)
        await self.gate.wait()
        if lora_id in self.failing:
            raise LoraUnavailable("unreachable", "no such file")
        write_factors(LoraFactors({"unet": {"layer": LAYER}}), self.file(lora_id))
        return FACTS

    def evict(self, keep: Collection[str]) -> list[str]:
        self.kept.append(set(keep))
        if self.evicting:
            for lora_id in self.fetched:
                self.discard(lora_id)
        return []


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def opened(_model: LoadedModel, files: Sequence[tuple[Path, float]]) -> AdapterSet:
    """Return a set of what is in the files, without a model."""
    layers = [
        one if scale == 1 else one.scaled(scale)
        for path, scale in files
        for one in open_factors(path).by_component["unet"].values()
    ]
    return AdapterSet(None, None, tuple(layers))


def new_shelf(folder: Folder, *, num_sets: float = 10, open_set: Any = opened) -> LoraShelf:
    max_bytes = int(num_sets * LAYER.num_bytes)
    return LoraShelf(MODEL, folder, max_bytes=max_bytes, open_set=open_set)


def lease(*uses: tuple[str, float]) -> Lease:
    loras = tuple(LoraUse(f"name-{one}", scale, one) for one, scale in uses)
    request = dataclasses.replace(image_request(), add_ons=AddOns(loras=loras))
    return Lease(Fence(1, 1), request, 60.0, 0.0, loras=tuple(order(one) for one, _ in uses))


async def test_the_same_loras_at_the_same_scales_are_one_object(folder: Folder) -> None:
    shelf = new_shelf(folder)
    assert await shelf.adapters(lease()) is None
    first = await shelf.adapters(lease(("a", 1.0), ("b", 0.5)))
    assert first is not None
    assert await shelf.adapters(lease(("a", 1.0), ("b", 0.5))) is first
    other = await shelf.adapters(lease(("a", 1.0), ("b", 0.6)))
    assert other is not None
    assert other is not first
    assert [float(one.expand[0, 0]) for one in other.layers] == pytest.approx([1.0, 0.6])
    assert folder.fetched == ["a", "b"]
    # what a lease needs is not pushed out by what is fetched for it
    assert folder.kept == [{"a", "b"}] * 2
    assert len(shelf.residents) == 2
    assert shelf.num_bytes == 4 * LAYER.num_bytes


async def test_the_longest_unused_sets_go_when_there_is_no_room(folder: Folder) -> None:
    shelf = new_shelf(folder, num_sets=2.5)
    a, b = [await shelf.adapters(lease((one, 1.0))) for one in "ab"]
    assert await shelf.adapters(lease(("a", 1.0))) is a
    await shelf.adapters(lease(("c", 1.0)))
    assert shelf.num_bytes == 2 * LAYER.num_bytes
    assert await shelf.adapters(lease(("a", 1.0))) is a
    assert await shelf.adapters(lease(("b", 1.0))) is not b
    # its file is still here
    assert folder.fetched == ["a", "b", "c"]


async def test_a_set_larger_than_the_bound_is_kept_until_another_is_used(folder: Folder) -> None:
    shelf = new_shelf(folder, num_sets=0.5)
    first = await shelf.adapters(lease(("a", 1.0)))
    assert await shelf.adapters(lease(("a", 1.0))) is first
    await shelf.adapters(lease(("b", 1.0)))
    assert shelf.num_bytes == LAYER.num_bytes
    assert await shelf.adapters(lease(("a", 1.0))) is not first


async def test_of_several_that_ask_one_opens_and_one_that_is_cancelled_leaves_it_to_the_others(
    folder: Folder,
) -> None:
    shelf = new_shelf(folder)
    folder.gate.clear()
    asking = [asyncio.create_task(shelf.adapters(lease(("a", 1.0)))) for _ in range(4)]
    await until(lambda: folder.fetched)
    asking[0].cancel()
    await asyncio.wait(asking[:1])
    folder.gate.set()
    found = await asyncio.gather(*asking[1:])
    assert found[0] is not None
    assert all(one is found[0] for one in found)
    assert folder.fetched == ["a"]


async def test_one_that_cannot_be_had_fails_alone_and_is_tried_again(folder: Folder) -> None:
    shelf = new_shelf(folder)
    folder.failing = {"b"}
    leases = [lease(("a", 1.0)), lease(("b", 1.0)), lease(("a", 1.0), ("b", 1.0))]
    found = await asyncio.gather(*map(shelf.adapters, leases), return_exceptions=True)
    assert isinstance(found[0], AdapterSet)
    for end in found[1:]:
        assert isinstance(end, RequestFailed)
        assert end.stage == "lora"
        assert "no such file" in end.message
    assert "b" not in "".join(shelf.residents)
    folder.failing = set()
    assert await shelf.adapters(leases[2]) is not None


@pytest.mark.parametrize(
    "error", [ModelUnsupported("a layer that is not there"), RuntimeError("out of memory")]
)
async def test_what_goes_wrong_with_a_whole_file_fails_its_request_and_no_other(
    folder: Folder, error: Exception
) -> None:
    def failing(model: LoadedModel, files: Sequence[tuple[Path, float]]) -> AdapterSet:
        if "bad" in files[0][0].name:
            raise error
        return opened(model, files)

    shelf = new_shelf(folder, open_set=failing)
    with pytest.raises(RequestFailed, match=str(error)):
        await shelf.adapters(lease(("bad", 1.0)))
    assert await shelf.adapters(lease(("good", 1.0))) is not None
    assert folder.fetched == ["bad", "good"]


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "version"])
async def test_damaged_files_are_fetched_again(folder: Folder, damage: str) -> None:
    uses = ("a", 1.0), ("b", 1.0)
    wanted = await new_shelf(folder).adapters(lease(*uses))
    for name in "ab":
        content = folder.file(name).read_bytes()
        # in place, a file would change under those who have it mapped
        folder.discard(name)
        folder.file(name).write_bytes(
            {
                "cut": content[:-1],
                "empty": b"",
                "text": b"x" * len(content),
                "version": content.replace(b'"version":"1"', b'"version":"0"'),
            }[damage]
        )
    found = await new_shelf(folder).adapters(lease(*uses))
    assert folder.fetched == ["a", "b"] * 2
    assert wanted is not None
    assert found is not None
    for one, other in zip(wanted.layers, found.layers, strict=True):
        assert torch.equal(one.shrink, other.shrink)


async def test_a_file_pushed_out_while_it_is_opened_is_fetched_again(folder: Folder) -> None:
    is_first = threading.Event()

    def evicted(model: LoadedModel, files: Sequence[tuple[Path, float]]) -> AdapterSet:
        if not is_first.is_set():
            is_first.set()
            os.unlink(files[0][0])
        return opened(model, files)

    assert await new_shelf(folder, open_set=evicted).adapters(lease(("a", 1.0))) is not None
    assert folder.fetched == ["a", "a"]


async def test_a_file_that_stays_bad_fails_its_request(folder: Folder) -> None:
    def cut(model: LoadedModel, files: Sequence[tuple[Path, float]]) -> AdapterSet:
        os.truncate(files[0][0], 9)
        return opened(model, files)

    with pytest.raises(RequestFailed, match="no whole file of factors"):
        await new_shelf(folder, open_set=cut).adapters(lease(("a", 1.0)))
    assert folder.fetched == ["a", "a"]


async def test_a_disk_with_no_room_for_a_lora_says_what_to_change(folder: Folder) -> None:
    folder.evicting = True
    with pytest.raises(RequestFailed, match=r"'name-a'.*raise loras\.max_disk_bytes"):
        await new_shelf(folder).adapters(lease(("a", 1.0)))


async def test_a_store_that_is_at_it_goes_first(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = new_shelf(folder)
    asking = asyncio.create_task(shelf.adapters(lease(("a", 1.0)), store_first=True))
    await asyncio.sleep(0)
    # what the node's store does
    write_factors(LoraFactors({"unet": {"layer": LAYER}}), folder.file("a"))
    assert await asking is not None
    assert folder.fetched == []
    # without one it is fetched here, after a moment
    monkeypatch.setattr("ray_cluster.replica.denoise.lora_shelf._STORE_FIRST_S", 0.2)
    assert await shelf.adapters(lease(("b", 1.0)), store_first=True) is not None
    assert folder.fetched == ["b"]
