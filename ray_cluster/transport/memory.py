"""Memory for the frames of messages."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_cluster.transport.links import Bytes, Message

_ALIGNMENT = 64


def rounded_up(num_bytes: int, to: int = _ALIGNMENT) -> int:
    """Return the next multiple of ``to``."""
    return -(-num_bytes // to) * to


@dataclass(frozen=True, slots=True)
class Places:
    """Where frames stand in one piece of memory, fit to be read as numbers of any format.

    Attributes:
        offsets: in bytes, of each frame.
        num_bytes: of the whole piece.
    """

    offsets: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Places:
        """Return places for frames of so many bytes."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += rounded_up(size)
        return cls(tuple(offsets), end)


def without_bytes(head: bytes, num_frames: int) -> Message:
    """Return a message whose frames, if it has any, are empty."""
    empty = np.empty(0, np.uint8)
    empty.flags.writeable = False
    return Message(head, (empty,) * num_frames, lambda: None)


class Buffers:
    """Buffers of received messages, used again: fresh pages cost more than what is copied there.

    Args:
        max_kept: idle ones at most.
    """

    def __init__(self, max_kept: int) -> None:
        self._max_kept = max_kept
        self._kept: list[Bytes] = []
        self._lent: set[int] = set()
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Bytes:
        """Return a buffer of at least so many bytes."""
        with self._lock:
            # not one that is much too large: a larger message needs it
            fitting = [one for one in self._kept if num_bytes <= one.nbytes <= 4 * num_bytes]
            if fitting:
                buffer = min(fitting, key=lambda one: one.nbytes)
                self._kept = [one for one in self._kept if one is not buffer]
            else:
                buffer = np.empty(num_bytes, np.uint8)
            self._lent.add(id(buffer))
            return buffer

    def give(self, buffer: Bytes) -> None:
        """Take a buffer back; a second time does nothing."""
        with self._lock:
            if id(buffer) in self._lent:
                self._lent.remove(id(buffer))
                self._kept = [buffer, *self._kept][: self._max_kept]
