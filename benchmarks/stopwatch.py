"""Stopwatches for CPU, wall and device time, and calls that are measured in turns.

Ways that are compared are called one after the other in every round, and the order alternates from
round to round, so that a slow drift of the machine favours none of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Cost:
    """What a block of work took.

    Attributes:
        cpu_s: CPU seconds of the calling thread; other processes hardly affect it.
        wall_s: seconds on the wall clock, waiting for a core included.
        process_s: CPU seconds of all threads of the process.
    """

    cpu_s: float
    wall_s: float
    process_s: float

    def per(self, count: float) -> Cost:
        """Return the cost of one of ``count`` equal parts, which may be the share of one."""
        return Cost(self.cpu_s / count, self.wall_s / count, self.process_s / count)


class Stopwatch:
    """A context manager; ``cost`` is set at its end."""

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
        self.cost = Cost(*(end - start for start, end in zip(self._started, ended, strict=True)))


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[Cost]]:
    """Call each way once per round; return the costs by name."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for order in _turns(ways, rounds):
        for name in order:
            with Stopwatch() as watch:
                ways[name]()
            costs[name].append(watch.cost)
    return costs


@dataclass(frozen=True, slots=True)
class Sampling:
    """How often short calls are timed.

    Attributes:
        sample_s: a sample is as many calls as take this long, up to ``most_calls``.
        fewest_rounds: samples of each call even if the time is over.
        most_rounds: samples of each call however much time is left.
    """

    sample_s: float
    most_calls: int
    fewest_rounds: int
    most_rounds: int


def sample_in_turns(
    calls: Mapping[str, Callable[[], object]],
    sampling: Sampling,
    *,
    device: str = "cpu",
    limit_s: float = math.inf,
) -> dict[str, list[float]]:
    """Return by name the seconds of one call in each round.

    Every call is made at least twice before, so that compilation and capture are not in the
    figures. On CUDA a sample is the time between two events, waiting for the host included; on a
    CPU it is CPU time of the thread.

    Args:
        limit_s: after which no further round begins, beyond the fewest.
    """
    timer = cuda_seconds if device == "cuda" else cpu_seconds
    started_s, counts = time.monotonic(), {}
    for name, call in calls.items():
        call()
        about_s = max(timer(call, 1), 1e-7)
        counts[name] = min(sampling.most_calls, 1 + int(sampling.sample_s / about_s))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number, order in enumerate(_turns(calls, sampling.most_rounds)):
        if number >= sampling.fewest_rounds and time.monotonic() - started_s > limit_s:
            break
        for name in order:
            samples[name].append(timer(calls[name], counts[name]) / counts[name])
    return samples


def cpu_seconds(call: Callable[[], object], count: int) -> float:
    """Return the CPU seconds of this thread for so many calls."""
    started_s = time.thread_time()
    for _ in range(count):
        call()
    return time.thread_time() - started_s


def cuda_seconds(call: Callable[[], object], count: int) -> float:
    """Return the seconds on the device from the first of so many calls to the end of the last."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _turns(ways: Mapping[str, object], rounds: int) -> Iterator[list[str]]:
    """Yield the order of each round."""
    for number in range(rounds):
        yield list(ways)[:: 1 if number % 2 == 0 else -1]


def _now() -> tuple[float, float, float]:
    return time.thread_time(), time.perf_counter(), time.process_time()
