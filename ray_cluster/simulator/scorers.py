"""Simulated replicas of a scorer: one image each at a time, first come first served."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapreplace

from ray_cluster.simulator.events import EventQueue


class Scorers:
    """Give images their confidences, after a while.

    Attributes:
        num_held: images that wait for a score or are being scored.

    Args:
        events: the clock.
        num_replicas: None for a scorer of infinite capacity, which takes no time of its own.
        image_s: seconds that a replica takes for an image.
    """

    def __init__(self, events: EventQueue, num_replicas: int | None, image_s: float) -> None:
        self._events = events
        self._image_s = image_s
        self._free_at_s = None if num_replicas is None else [0.0] * num_replicas
        self.num_held = 0

    def score(self, on_scored: Callable[[], None]) -> None:
        """Score an image; it is told when that is done."""
        if self._free_at_s is None:
            on_scored()
            return
        self.num_held += 1
        end_s = max(self._free_at_s[0], self._events.now_s) + self._image_s
        heapreplace(self._free_at_s, end_s)

        def done() -> None:
            self.num_held -= 1
            on_scored()

        self._events.at(end_s, done)
