"""Which entries of a store are to go so that the rest takes no more than some bytes."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

# whose names are in memory at a time
_MOST_NAMES = 1000


class Entry(Protocol):
    """The part of a :class:`~ray_cluster.storage.blob_store.Blob` that is used here."""

    @property
    def name(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def changed_s(self) -> float: ...


class Excess:
    """The oldest entries above a size, found in one look at all of them, or in two.

    Of each entry 16 bytes are kept, and the names of the oldest thousand. Where these do not
    suffice, as after the bound was lowered, a second look finds the names of the others.

    Args:
        max_bytes: what all entries together may take.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._changed_s = array("d")
        self._sizes = array("q")
        # the negative instant first: the youngest of the oldest is the first to leave
        self._oldest: list[tuple[float, str, int]] = []

    def note(self, entry: Entry) -> None:
        """Take an entry into account."""
        self._changed_s.append(entry.changed_s)
        self._sizes.append(entry.num_bytes)
        item = -entry.changed_s, entry.name, entry.num_bytes
        if len(self._oldest) < _MOST_NAMES:
            heapq.heappush(self._oldest, item)
        elif item > self._oldest[0]:
            heapq.heapreplace(self._oldest, item)

    def names(self, look_again: Iterable[Entry]) -> Iterator[str]:
        """Yield the names of what is to go.

        Args:
            look_again: all entries as they are by then; only looked at if need be. What has come
                since stays.
        """
        excess = sum(self._sizes) - self._max_bytes
        if excess <= 0:
            return
        if len(self._sizes) == len(self._oldest) or excess <= sum(one[2] for one in self._oldest):
            for _, name, num_bytes in sorted(self._oldest, reverse=True):
                if excess <= 0:
                    return
                yield name
                excess -= num_bytes
            return
        yield from self._names_of_many(excess, look_again)

    def _names_of_many(self, excess: int, look_again: Iterable[Entry]) -> Iterator[str]:
        """Yield what is older than the youngest that is to go, and enough of what is as old."""
        until_s, older_bytes = self._youngest(excess)
        as_old_bytes = excess - older_bytes
        for entry in look_again:
            if entry.changed_s < until_s:
                yield entry.name
            elif entry.changed_s == until_s and as_old_bytes > 0:
                as_old_bytes -= entry.num_bytes
                yield entry.name

    def _youngest(self, excess: int) -> tuple[float, int]:
        """Return the instant of the youngest that is to go, and the bytes of all before that."""
        changed_s, sizes = np.frombuffer(self._changed_s), np.frombuffer(self._sizes, np.int64)
        by_age = np.argsort(changed_s)
        last = np.searchsorted(np.cumsum(sizes[by_age]), excess)
        until_s = changed_s[by_age[last]]
        return float(until_s), int(sizes[changed_s < until_s].sum())
