"""Times a block of work in three ways at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Cost:
    """What a block of work took.

    Attributes:
        cpu_s: CPU seconds of the thread that did it; hardly touched by other processes.
        wall_s: seconds on the wall clock, with all the waiting for a core.
        process_s: CPU seconds of all threads of the process; equal to ``cpu_s`` when the work
            really was done by one thread.
    """

    cpu_s: float
    wall_s: float
    process_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.cpu_s + other.cpu_s, self.wall_s + other.wall_s, self.process_s + other.process_s
        )

    def per(self, count: int) -> Cost:
        """Return the cost of one of ``count`` equal parts."""
        return Cost(self.cpu_s / count, self.wall_s / count, self.process_s / count)


class Stopwatch:
    """A context manager; ``cost`` is there after its end."""

    cost: Cost

    def __enter__(self) -> Stopwatch:
        self._started = _now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = _now()
        self.cost = Cost(
            *(after - before for before, after in zip(self._started, ended, strict=True))
        )


def in_turns(
    first: Callable[[], object], second: Callable[[], object], count: int
) -> tuple[list[float], list[float]]:
    """Call both ``count`` times, each pair in the other order than the one before.

    Returns:
        The CPU seconds of the thread that each call took, the first's and the second's.
    """
    first_s: list[float] = []
    second_s: list[float] = []
    for turn in range(count):
        pair = [(first, first_s), (second, second_s)]
        for call, samples in pair if turn % 2 == 0 else pair[::-1]:
            with Stopwatch() as watch:
                call()
            samples.append(watch.cost.cpu_s)
    return first_s, second_s


def _now() -> tuple[float, float, float]:
    return time.thread_time(), time.perf_counter(), time.process_time()
