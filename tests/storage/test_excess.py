"""Bounding the size of a store: the oldest entries go, and the store is looked at twice at most."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from ray_cluster.storage.blob_store import Blob, BlobStore
from ray_cluster.storage.excess import Excess


def blobs(count: int, num_instants: int, seed: int = 0) -> list[Blob]:
    draw = random.Random(seed)
    return [
        Blob(f"image-{index}", draw.randrange(100), 1e9 + draw.randrange(num_instants) / 8)
        for index in range(count)
    ]


def left_after(found: Sequence[Blob], max_bytes: int) -> tuple[list[Blob], int]:
    """Return what stays, and how many looks that took."""
    excess, looks = Excess(max_bytes), 1
    for one in found:
        excess.note(one)

    def again() -> Iterator[Blob]:
        nonlocal looks
        looks += 1
        yield from found

    names = list(excess.names(again()))
    gone = set(names)
    assert len(gone) == len(names)
    return [one for one in found if one.name not in gone], looks


@pytest.mark.parametrize("num_instants", [1, 5, 10**9])
@pytest.mark.parametrize("count", [0, 1, 40, 1000, 1001, 2500])
def test_the_oldest_go_and_no_more_than_must(count: int, num_instants: int) -> None:
    found = blobs(count, num_instants)
    total = sum(one.num_bytes for one in found)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        left, looks = left_after(found, int(share * total))
        assert looks <= 2
        assert sum(one.num_bytes for one in left) <= int(share * total)
        stays = set(left)
        gone = [one for one in found if one not in stays]
        youngest_gone = max((one.changed_s for one in gone), default=0.0)
        assert all(one.changed_s >= youngest_gone for one in left)
        # without the last of them, too much would have stayed
        as_young = [one.num_bytes for one in gone if one.changed_s == youngest_gone]
        spare = share * total - sum(one.num_bytes for one in left)
        assert not gone or spare < max(as_young) + 1


def test_one_look_is_enough_where_little_is_to_go() -> None:
    found = blobs(20_000, 10**9)
    total = sum(one.num_bytes for one in found)
    assert left_after(found, total - 10_000)[1] == 1
    assert left_after(found, total // 2)[1] == 2


def test_what_comes_while_the_oldest_are_found_stays() -> None:
    found = blobs(3000, 10**9)
    excess = Excess(0)
    for one in found:
        excess.note(one)
    newer = [Blob("new", 10, 2e9), Blob(found[0].name, 10, 2e9)]
    assert set(excess.names([*newer, *found[1:]])) == {one.name for one in found[1:]}


def test_many_entries_take_little_memory() -> None:
    def found() -> Iterator[Blob]:
        draw = random.Random(1)
        for index in range(100_000):
            yield Blob(f"image-{index:032}.png", 1000, draw.random())

    excess, num_gone = Excess(10_000_000), 0
    tracemalloc.start()
    try:
        for one in found():
            excess.note(one)
        for _ in excess.names(found()):
            num_gone += 1
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_gone == 90_000
    # 40 bytes each while they are sorted, and the names of a thousand
    assert peak_bytes < 6 << 20, peak_bytes


def test_a_sweep_looks_at_a_store_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore("memory://swept-by-size")
    for index in range(5000):
        store.put(f"image-{index}", b"0123456789")
    real, looks = store.entries, 0

    def entries() -> Iterator[Blob]:
        nonlocal looks
        looks += 1
        yield from real()

    monkeypatch.setattr(store, "entries", entries)
    assert store.sweep(before_s=0.0, max_bytes=50_000) == 0
    assert looks == 1
    assert store.sweep(before_s=0.0, max_bytes=1000) == 4900
    assert looks <= 3
    assert len(list(real())) == 100
