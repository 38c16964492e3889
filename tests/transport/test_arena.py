"""Blocks never overlap, the arena keeps to its bound, and nothing is ever stuck."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_cluster.transport.arena import Arena, Block, can_share_memory, mapped

pytestmark = pytest.mark.skipif(not can_share_memory(), reason="needs memfd")
MAX_BYTES = 4 * 2**20


def _take(arena: Arena, num_bytes: int) -> Block | None:
    taken = arena.take(num_bytes)
    if taken is None:
        return None
    if taken.added is not None:
        os.close(taken.added.descriptor)
    return taken.block


@given(st.lists(st.tuples(st.booleans(), st.integers(1, MAX_BYTES)), max_size=40))
def test_any_blocks_are_apart_and_within_the_bound(events: list[tuple[bool, int]]) -> None:
    arena, held = Arena(MAX_BYTES), dict[int, Block]()
    for number, (is_release, size) in enumerate(events):
        if is_release and held:
            key = sorted(held)[size % len(held)]
            block = held.pop(key)
            assert (arena.at(block) == key % 251).all()
            arena.give(block)
        elif block := _take(arena, size):
            arena.at(block)[:] = number % 251
            held[number] = block
        assert arena.num_bytes <= MAX_BYTES
    for number, block in held.items():
        # nobody has written into it
        assert (arena.at(block) == number % 251).all()
        arena.give(block)
    assert _take(arena, MAX_BYTES) is not None


def test_the_other_side_maps_it_read_only_and_sees_what_is_written() -> None:
    arena = Arena(MAX_BYTES)
    taken = arena.take(5000)
    assert taken is not None
    assert taken.added is not None
    memory = mapped(taken.added.descriptor, taken.added.num_bytes)
    arena.at(taken.block)[:] = 7
    assert memory[:5000].sum() == 35_000
    with pytest.raises(ValueError, match="read-only"):
        memory[0] = 1
    with pytest.raises(OSError, match="does not stay as large"):
        mapped(taken.added.descriptor, taken.added.num_bytes + 1)
    os.close(taken.added.descriptor)


def test_memory_that_its_owner_could_shrink_is_not_mapped() -> None:
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 4096)
    with pytest.raises(OSError, match="does not stay as large"):
        mapped(descriptor, 4096)
    os.close(descriptor)
