"""A study while it is measured: contenders in turns, rows of tables, aims, and its progress.

Contenders are called one after the other in every round, and the order alternates from round to
round, so that a slow drift of the machine favours none of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from benchmarks.figures import Figure, at_least, at_most, paired_ratio, summarise

T = TypeVar("T")
Row = dict[str, Any]
Ways = Mapping[str, Callable[[], object]]
Report = Callable[[float, str], None]
"""Is called with the progress in [0, 1] and what is done at the moment."""

MODEL, NUM_STEPS, GUIDANCE = "shapes-sd", 20, 3.0
SCALES = (1.0, GUIDANCE)


class Cost(NamedTuple):
    """What a call took: CPU seconds of the thread, seconds on the wall clock, of all threads."""

    cpu_s: float
    wall_s: float
    process_s: float

    @classmethod
    def now(cls) -> Cost:
        """Return what the clocks say."""
        return cls(time.thread_time(), time.perf_counter(), time.process_time())

    def since(self, start: Cost, parts: float = 1.0) -> Cost:
        """Return the difference of two readings, of one of so many equal parts."""
        return Cost(*((end - begin) / parts for end, begin in zip(self, start, strict=True)))


class Plot(NamedTuple):
    """Lines of a table: ``ys`` over ``x``, a line for each value of the columns ``by``."""

    table: str
    x: str
    ys: tuple[str, ...]
    by: tuple[str, ...] = ()
    is_log: bool = False


@dataclass(frozen=True)
class Case:
    """The same work by several contenders.

    Attributes:
        about: columns that name it.
        ways: contenders by name; the first is the baseline. Those that return images by request
            id get a ratio only if their images are the baseline's.
        rounds: calls of each, after one that is not counted.
        shares: of the work that a call does, by contender, where it is not 1.
        clock: of :class:`Cost`, that ratios are of.
        inexact: contenders whose images may differ.
        now: reads the clocks.
    """

    about: Row
    ways: Ways
    rounds: int
    shares: Mapping[str, float] = field(default_factory=dict)
    clock: str = "cpu"
    inexact: tuple[str, ...] = ()
    now: Callable[[], Cost] = Cost.now


class Study:
    """One section of the results in the making.

    Args:
        quick: whether it is only to be seen that all works.
    """

    def __init__(self, *, quick: bool, report: Report = lambda _done, _text: None) -> None:
        self.quick = quick
        self.plots: list[Plot] = []
        self.found: dict[str, Any] = {"what": "", "tables": {}}
        self._report, self._span = report, (0.0, 1.0)

    def pick(self, whole: T, quick: T) -> T:
        """Return how much is measured."""
        return quick if self.quick else whole

    def say(self, done: float, text: str) -> None:
        """Report the progress in [0, 1] of the section, or of the part that is measured."""
        first, last = self._span
        self._report(first + (last - first) * done, text)

    @contextmanager
    def part(self, first: float, last: float) -> Iterator[None]:
        """Measure a part, whose progress is one between two of the section."""
        before, self._span = self._span, (first, last)
        yield
        self._span = before

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and report each."""
        todo = list(items)
        for number, one in enumerate(todo):
            self.say(number / len(todo), _words(one))
            yield one

    def row(self, table: str, **columns: Any) -> Row:
        """Add a row to a table."""
        self.found["tables"].setdefault(table, []).append(columns)
        return columns

    def at_least(self, name: str, least: float, figure: Figure | float, unit: str) -> None:
        """Add an aim: a figure that should not be below a level."""
        self.found.setdefault("aims", []).append(at_least(name, least, figure, unit))

    def at_most(self, name: str, most: float, figure: Figure | float, unit: str) -> None:
        """Add an aim: a figure that should not be above a level."""
        self.found.setdefault("aims", []).append(at_most(name, most, figure, unit))

    def note(self, text: str) -> None:
        """Add a sentence about the section."""
        self.found.setdefault("notes", []).append(text)

    def fail(self, text: str) -> None:
        """Note that something is wrong."""
        self.found.setdefault("problems", []).append(text)

    def compare(self, table: str, case: Case) -> dict[str, Row]:
        """Measure a case; add a row for each contender, and return them by contender.

        ``speed_up`` is the baseline's time over the contender's, the median of pairs.
        """
        costs, made = _measure(case)
        name, rows = next(iter(case.ways)), {}
        for way, own in costs.items():
            rows[way] = row = self.row(table, **case.about, by=way)
            gap = None if way == name else _gap(made[name], made[way])
            if gap is not None:
                row["largest_difference_255"] = gap
            if gap is not None and gap > 1 and way not in case.inexact:
                self.fail(f"{_words(case.about)}, {way}: images differ by {gap}/255, allowed 1")
                continue
            for clock in dict.fromkeys((case.clock, "wall")):
                times = [
                    [getattr(one, f"{clock}_s") for one in side] for side in (costs[name], own)
                ]
                row[f"{clock}_ms"] = summarise([1e3 * one for one in times[1]])
                row["speed_up" if clock == case.clock else f"speed_up_{clock}"] = paired_ratio(
                    *times
                )
        return rows


def _measure(case: Case) -> tuple[dict[str, list[Cost]], dict[str, Any]]:
    made: dict[str, Any] = {}

    def kept(name: str) -> Callable[[], None]:
        return lambda: made.update({name: case.ways[name]()})

    ways = {name: kept(name) for name in case.ways}
    in_turns(ways, 1)
    return in_turns(ways, case.rounds, shares=case.shares, now=case.now), made


def ratio(rows: Mapping[str, Row], first: str, second: str, clock: str = "cpu") -> Figure:
    """Return the times of one contender over another's, of the rows of a case."""
    return paired_ratio(*(rows[name][f"{clock}_ms"]["samples"] for name in (first, second)))


def in_turns(
    ways: Ways,
    rounds: int,
    *,
    shares: Mapping[str, float] | None = None,
    now: Callable[[], Cost] = Cost.now,
) -> dict[str, list[Cost]]:
    """Call each way once per round; return the costs by name, each of one share of the work."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for order in turns(ways, rounds):
        for name in order:
            start = now()
            ways[name]()
            costs[name].append(now().since(start, (shares or {}).get(name, 1.0)))
    return costs


def turns(ways: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """Yield the order of each round."""
    for number in range(rounds):
        yield list(ways)[:: 1 if number % 2 == 0 else -1]


class Sampling(NamedTuple):
    """How often short calls are timed.

    Attributes:
        sample_s: a sample is as many calls as take this long, up to ``most_calls``.
        fewest_rounds: samples of each call even if the time is over.
    """

    sample_s: float
    most_calls: int
    fewest_rounds: int
    most_rounds: int


def sample_in_turns(
    calls: Ways, sampling: Sampling, *, device: str = "cpu", limit_s: float = math.inf
) -> dict[str, list[float]]:
    """Return by name the seconds of one call in each round.

    Every call is made at least twice before, so that compilation and capture are not in the
    figures. On CUDA a sample is the time between two events, waiting for the host included; on a
    CPU it is CPU time of the thread. After ``limit_s`` no round begins beyond the fewest.
    """
    timer = cuda_seconds if device == "cuda" else cpu_seconds
    started_s, counts = time.monotonic(), {}
    for name, call in calls.items():
        call()
        about_s = max(timer(call, 1), 1e-7)
        counts[name] = min(sampling.most_calls, 1 + int(sampling.sample_s / about_s))
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number, order in enumerate(turns(calls, sampling.most_rounds)):
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


def largest_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> int:
    """Return the largest difference of a pixel value over the images in both, in 1/255.

    Raises:
        ValueError: they have no image in common, or one of another shape.
    """
    common = first.keys() & second.keys()
    if not common or any(first[name].shape != second[name].shape for name in common):
        raise ValueError("there is nothing to compare: no common image of one shape")
    return max(
        int(abs(first[name].astype(int) - second[name].astype(int)).max()) for name in common
    )


def _gap(first: object, second: object) -> int | None:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return largest_difference(first, second)
    return None


def _words(one: object) -> str:
    match one:
        case Mapping():
            return ", ".join(f"{key} {value}" for key, value in one.items())
        case str():
            return one
        case Sequence():
            return ", ".join(map(_words, one))
    return str(one)
