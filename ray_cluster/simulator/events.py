"""Virtual time: instants at which something is to happen, in their order."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import partial

Act = Callable[[], None]


class Timer:
    """A callback that is due once, unless it is called off."""

    __slots__ = ("act",)

    def __init__(self, act: Act) -> None:
        self.act: Act | None = act

    def call_off(self) -> None:
        """Cancel it; does nothing if it has happened."""
        self.act = None


class EventQueue:
    """A virtual clock that jumps from one event to the next.

    Events of one instant happen in the order of their scheduling, so that a run depends on its
    seeds alone.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._count = 0

    def __call__(self) -> float:
        """Return the present instant, as a live clock does."""
        return self._now_s

    @property
    def now_s(self) -> float:
        return self._now_s

    def at(self, at_s: float, act: Act) -> Timer:
        """Schedule a callback; an instant that has passed counts as now.

        Raises:
            ValueError: the instant is not a finite number.
        """
        _check(at_s)
        timer = Timer(act)
        heapq.heappush(self._heap, (max(self._now_s, at_s), self._count, timer))
        self._count += 1
        return timer

    def at_each(self, instants_s: Sequence[float], act: Callable[[int], None]) -> None:
        """Schedule a callback at each of many instants; it gets the instant's number.

        As :meth:`at` for one after the other, but only the next of them is in the heap, so that a
        long workload does not slow everything down.

        Raises:
            ValueError: an instant is not a finite number.
        """
        for at_s in instants_s:
            _check(at_s)
        first, self._count = self._count, self._count + len(instants_s)
        order = iter(sorted(range(len(instants_s)), key=instants_s.__getitem__))

        def happen(place: int) -> None:
            expect(next(order, None))
            act(place)

        def expect(place: int | None) -> None:
            if place is not None:
                due_s = max(self._now_s, instants_s[place])
                heapq.heappush(self._heap, (due_s, first + place, Timer(partial(happen, place))))

        expect(next(order, None))

    def after(self, delay_s: float, act: Act) -> Timer:
        return self.at(self._now_s + delay_s, act)

    def run(self, until_s: float = math.inf) -> None:
        """Run all callbacks that are due up to an instant, or all there are."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            at_s, _, timer = pop(heap)
            act, timer.act = timer.act, None
            # else it was called off
            if act is not None:
                self._now_s = at_s
                act()
        if math.isfinite(until_s):
            self._now_s = max(self._now_s, until_s)


def _check(at_s: float) -> None:
    if not math.isfinite(at_s):
        raise ValueError(f"an event needs a finite instant; given {at_s}")
