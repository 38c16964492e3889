"""Memory that one process writes and another one maps, in segments that have no name.

A segment is a memfd: its descriptor goes to the other process, and the kernel frees it when both
are gone, however they end.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
from bisect import insort
from dataclasses import dataclass, field

import numpy as np

from ray_cluster.transport.links import Bytes
from ray_cluster.transport.memory import rounded_up

_FIRST_SEGMENT_BYTES = 2**20


def can_share_memory() -> bool:
    """Whether this machine has such memory, and lets this process have it."""
    if sys.platform != "linux":
        return False
    try:
        os.close(_new_memory(mmap.PAGESIZE))
    except OSError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a segment."""

    segment: int
    offset: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class Segment:
    """One piece of shared memory, and its free ranges.

    Attributes:
        descriptor: for the other process; -1 once it has it.
        free: (offset, bytes) of ranges that do not touch, in order.
    """

    number: int
    descriptor: int
    memory: Bytes
    free: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.memory.nbytes

    @property
    def is_idle(self) -> bool:
        """Whether nothing of it is in use."""
        return self.free == [(0, self.num_bytes)]

    def take(self, num_bytes: int) -> Block | None:
        """Return a block of the first range that is large enough; None without one."""
        for index, (offset, size) in enumerate(self.free):
            if size >= num_bytes:
                left = (offset + num_bytes, size - num_bytes)
                self.free[index : index + 1] = [left] if left[1] else []
                return Block(self.number, offset, num_bytes)
        return None

    def give(self, block: Block) -> None:
        """Take a block back, and join the ranges around it."""
        insort(self.free, (block.offset, block.num_bytes))
        joined: list[tuple[int, int]] = []
        for offset, size in self.free:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((offset, size))
        self.free = joined


@dataclass(frozen=True, slots=True)
class Taken:
    """A block, and what the other process must know before it reads it.

    Attributes:
        dropped: numbers of segments that are gone.
        added: a new one.
    """

    block: Block
    dropped: tuple[int, ...] = ()
    added: Segment | None = None


class Arena:
    """Segments for the messages of one direction; for one thread at a time.

    Args:
        max_bytes: of all segments together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = rounded_up(max_bytes, mmap.PAGESIZE)
        self._segments: dict[int, Segment] = {}
        self._num_made = 0

    @property
    def num_bytes(self) -> int:
        """Size of all segments."""
        return sum(one.num_bytes for one in self._segments.values())

    def take(self, num_bytes: int) -> Taken | None:
        """Return a block, in a new segment if need be; None while there is no room.

        There is room for a message of at most ``max_bytes`` once all others are released.
        """
        for segment in self._segments.values():
            if block := segment.take(num_bytes):
                return Taken(block)
        size = rounded_up(num_bytes, mmap.PAGESIZE)
        idle = [one for one in self._segments.values() if one.is_idle]
        if self.num_bytes - sum(one.num_bytes for one in idle) + size > self._max_bytes:
            return None
        dropped: list[int] = []
        while self.num_bytes + size > self._max_bytes:
            dropped.append(idle.pop().number)
            del self._segments[dropped[-1]]
        # each segment doubles the arena, so that there are few
        wanted = max(size, self.num_bytes, _FIRST_SEGMENT_BYTES)
        added = self._add(min(wanted, self._max_bytes - self.num_bytes))
        block = added.take(num_bytes)
        assert block is not None, "a new segment is large enough"
        return Taken(block, tuple(dropped), added)

    def give(self, block: Block) -> None:
        """Take a block back."""
        self._segments[block.segment].give(block)

    def at(self, block: Block) -> Bytes:
        """Return the memory of a block."""
        memory = self._segments[block.segment].memory
        return memory[block.offset : block.offset + block.num_bytes]

    def clear(self) -> None:
        """Drop all segments."""
        self._segments.clear()

    def _add(self, num_bytes: int) -> Segment:
        descriptor = _new_memory(num_bytes)
        try:
            # the mapping has a descriptor of its own
            memory = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        except OSError:
            os.close(descriptor)
            raise
        segment = Segment(self._num_made, descriptor, memory, [(0, num_bytes)])
        self._num_made += 1
        self._segments[segment.number] = segment
        return segment


def mapped(descriptor: int, num_bytes: int) -> Bytes:
    """Return another process' segment, read-only; the descriptor stays open.

    Raises:
        OSError: it is no such memory, or smaller; or its owner could make it smaller, which would
            kill whoever reads it.
    """
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    if not seals & fcntl.F_SEAL_SHRINK or os.fstat(descriptor).st_size < num_bytes:
        raise OSError(f"a segment of {num_bytes} bytes that does not stay as large")
    return np.frombuffer(mmap.mmap(descriptor, num_bytes, prot=mmap.PROT_READ), np.uint8)


def _new_memory(num_bytes: int) -> int:
    """Return the descriptor of new memory whose size is fixed."""
    descriptor = os.memfd_create("ray-cluster", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
