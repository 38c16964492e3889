"""Finds registered names that look like one that there is not, at a bounded price."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from ray_cluster.config.validation_errors import likeness_to

_MAX_CHARS = 64
# names that are compared on either side of where the given one would stand, in each order
_NEIGHBOURS = 6
_NUM_NEAR = 3
# of the pairs of letters
_LEAST_SHARE = 0.5


class NearNames:
    """Keeps names in two orders: by their beginnings and by their ends.

    A slip of the pen leaves one of these as it was, so that the name which is meant stands beside
    the given one. However many names there are, two dozen are compared: callers choose what is
    searched for, on the dispatcher's event loop.

    Args:
        measure_to: returns what measures how alike names are to a given one, in [0, 1].
    """

    def __init__(self, measure_to: Callable[[str], Callable[[str], float]] = likeness_to) -> None:
        self._measure_to = measure_to
        self._by_beginning: list[tuple[str, str]] = []
        self._by_end: list[tuple[str, str]] = []

    def add(self, name: str) -> None:
        """Know a name."""
        insort(self._by_beginning, (name.lower(), name))
        insort(self._by_end, (name.lower()[::-1], name))

    def remove(self, name: str) -> None:
        """Know it no more."""
        del self._by_beginning[bisect_left(self._by_beginning, (name.lower(), name))]
        del self._by_end[bisect_left(self._by_end, (name.lower()[::-1], name))]

    def near(self, given: str) -> tuple[str, ...]:
        """Return some names like a given one, the most alike first."""
        lower = given[:_MAX_CHARS].lower()
        found = {
            *_beside(self._by_beginning, lower),
            *_beside(self._by_end, lower[::-1]),
        }
        measure = self._measure_to(lower)
        share = {one: measure(one.lower()) for one in found}
        ranked = sorted(found, key=lambda one: (-share[one], one))
        return tuple(one for one in ranked[:_NUM_NEAR] if share[one] >= _LEAST_SHARE)


def _beside(names: list[tuple[str, str]], key: str) -> list[str]:
    place = bisect_left(names, (key, ""))
    return [name for _, name in names[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]]
