"""Times a block of work in three ways at once."""

from __future__ import annotations

import time
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


def _now() -> tuple[float, float, float]:
    return time.thread_time(), time.perf_counter(), time.process_time()
