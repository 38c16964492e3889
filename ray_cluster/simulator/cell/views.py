"""One run of a cell over time: the length of the queue, and what replicas step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ray_cluster.simulator.arrivals import Floats
from ray_cluster.simulator.cell.cell import Fate
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.reports import Bar
from ray_cluster.simulator.workload import Arrival

SHOWN_S = 120.0
_MOST_REPLICAS = 16
# fewer than colours, as the others have one together
_MOST_SIZES = 7
_OTHERS = "other sizes"
_NUM_BINS = 60


@dataclass(frozen=True, slots=True)
class CellView:
    """How a run went.

    Attributes:
        times_s: middles of equal parts of the time in which requests arrive.
        waiting: mean number in each part of admitted requests that had not begun.
        replicas: those that are shown.
        sizes: of images, the smallest first; labels of the bars.
        bars: batches in the two minutes in which most requests arrive.
    """

    times_s: tuple[float, ...]
    waiting: tuple[float, ...]
    replicas: tuple[str, ...]
    sizes: tuple[str, ...]
    bars: tuple[Bar, ...]


class ViewRecorder:
    """Records when requests begin, and what some replicas step in the busiest two minutes.

    Args:
        workload: of the run.
        most_by_replica: rows that each replica steps together at most, by its name.
    """

    def __init__(self, workload: Sequence[Arrival], most_by_replica: Mapping[str, int]) -> None:
        self._workload = workload
        names = list(most_by_replica)
        places = np.unique(np.linspace(0, len(names) - 1, _MOST_REPLICAS).astype(int))
        self._most = {names[place]: most_by_replica[names[place]] for place in places.tolist()}
        self._begin_s = _busiest_s(np.array([one.arrival_s for one in workload]))
        self._end_s = self._begin_s + SHOWN_S
        self._began_s: dict[str, float] = {}
        self._shown: list[tuple[str, StepRun]] = []

    def __call__(self, name: str, run: StepRun) -> None:
        """Take note of a run of steps that is over."""
        for request_id in run.request_ids:
            self._began_s.setdefault(request_id, run.start_s)
        is_shown = run.ends_s[-1] > self._begin_s and run.start_s < self._end_s
        if name in self._most and is_shown:
            self._shown.append((name, run))

    def view(self, fates: Sequence[Fate]) -> CellView:
        """Return the view of the run, given what became of its requests."""
        times_s, waiting = waiting_over_time(fates, self._began_s)
        sizes = _sizes(self._workload)
        return CellView(times_s, waiting, tuple(self._most), sizes, self._bars(sizes))

    def _bars(self, sizes: Sequence[str]) -> tuple[Bar, ...]:
        rows = {name: row for row, name in enumerate(self._most)}
        bars = []
        for name, run in self._shown:
            batch = (_size(self._workload[int(one)]) for one in run.request_ids)
            counts = Counter(size if size in sizes else _OTHERS for size in batch)
            span = max(run.start_s, self._begin_s), min(run.ends_s[-1], self._end_s)
            most, num = self._most[name], 0
            for size in sizes:
                low, num = num / most, num + counts[size]
                if counts[size]:
                    bars.append(Bar(rows[name], *span, size, low, num / most))
        return tuple(bars)


def waiting_over_time(
    fates: Sequence[Fate], began_s: Mapping[str, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the middles of the parts of a run's time, and how many wait in each on average.

    Args:
        fates: of all requests.
        began_s: instants of their first steps, by their numbers.
    """
    admitted = [(f"{n}", one) for n, one in enumerate(fates) if one.end != "refused"]
    came = np.array([one.arrival.arrival_s for _, one in admitted])
    went = np.array([began_s.get(request_id, one.end_s) for request_id, one in admitted])
    last_s = max((one.arrival.arrival_s for one in fates), default=0.0) or 1.0
    edges = np.linspace(0.0, last_s, _NUM_BINS + 1)
    waited_s = np.diff(_passed_s(came, edges) - _passed_s(went, edges))
    means = waited_s / np.diff(edges)
    return tuple(((edges[1:] + edges[:-1]) / 2).tolist()), tuple(means.tolist())


def _passed_s(instants: Floats, edges: Floats) -> Floats:
    """Seconds that have passed since instants [N] at each edge [E], summed up, [E]."""
    ordered = np.sort(instants)
    counts = np.searchsorted(ordered, edges)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    passed: Floats = counts * edges - sums[counts]
    return passed


def _sizes(workload: Sequence[Arrival]) -> tuple[str, ...]:
    """The most frequent sizes, the smallest first, and one name for all others."""
    counts = Counter((one.width_px * one.height_px, _size(one)) for one in workload)
    most = sorted(size for size, _ in counts.most_common(_MOST_SIZES))
    names = tuple(name for _, name in most)
    return (*names, _OTHERS) if len(counts) > len(most) else names


def _size(one: Arrival) -> str:
    return f"{one.width_px}x{one.height_px}"


def _busiest_s(arrivals_s: Floats) -> float:
    """The beginning of the two minutes in which most requests arrive."""
    if not len(arrivals_s):
        return 0.0
    ordered = np.sort(arrivals_s)
    counts = np.searchsorted(ordered, ordered + SHOWN_S) - np.arange(len(ordered))
    return float(min(ordered[counts.argmax()], max(0.0, ordered[-1] - SHOWN_S)))
