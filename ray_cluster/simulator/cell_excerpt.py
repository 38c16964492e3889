"""One simulation for people to look at: who waits over time, and what replicas step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ray_cluster.simulator.arrivals import Floats
from ray_cluster.simulator.cell_experiment import CellExperiment, CellRun
from ray_cluster.simulator.cell_runs import Setting, simulate_cell
from ray_cluster.simulator.fates import Fate
from ray_cluster.simulator.replica import StepRun
from ray_cluster.simulator.reports import Bar, Line, Plot, Timeline
from ray_cluster.simulator.workload import Arrival

SHOWN_S = 120.0
_MOST_REPLICAS = 16
# fewer than colours, as the others have one together
_MOST_SIZES = 7
_OTHERS = "other sizes"
_NUM_BINS = 60


@dataclass(frozen=True, slots=True)
class CellExcerpt:
    """How the first policy did on the first seed of a load.

    Attributes:
        times_s: middles of equal parts of the time in which requests come.
        waiting: mean number in each part of requests that were let in and had not begun.
        replicas: those that are shown.
        sizes: of images, the smallest first; labels of the bars.
        bars: batches in the two minutes in which most requests come.
    """

    run: CellRun
    times_s: tuple[float, ...]
    waiting: tuple[float, ...]
    replicas: tuple[str, ...]
    sizes: tuple[str, ...]
    bars: tuple[Bar, ...]


def shown_runs(experiment: CellExperiment) -> list[CellRun]:
    """Return the runs that are shown: one for each load."""
    return [CellRun(experiment.policies[0], load, experiment.seeds[0]) for load in experiment.loads]


def excerpt_of(experiment: CellExperiment, run: CellRun, folder: Path) -> CellExcerpt:
    """Simulate a run and note what is shown of it."""
    setting = Setting.of(experiment, folder)
    workload = setting.workload(run.load, run.seed)
    replicas = _replicas(setting)
    notes = Notes(replicas, _busiest_s(np.array([one.arrival_s for one in workload])))
    fates = simulate_cell(setting, run, notes).fates
    times_s, waiting = waiting_of(fates, notes.began_s)
    sizes = _sizes(workload)
    bars = _bars(notes, workload, sizes)
    return CellExcerpt(run, times_s, waiting, tuple(replicas), sizes, bars)


class Notes:
    """Takes down of all runs of steps when each request began, and the runs that are shown.

    Args:
        replicas: those that are shown, with the most that each steps together.
        begin_s: of the time that is shown.
    """

    def __init__(self, replicas: Mapping[str, int], begin_s: float) -> None:
        self.replicas = replicas
        self.begin_s, self.end_s = begin_s, begin_s + SHOWN_S
        self.began_s: dict[str, float] = {}
        self.shown: list[tuple[str, StepRun]] = []

    def __call__(self, name: str, run: StepRun) -> None:
        for request_id in run.request_ids:
            self.began_s.setdefault(request_id, run.start_s)
        if name in self.replicas and run.ends_s[-1] > self.begin_s and run.start_s < self.end_s:
            self.shown.append((name, run))


def waiting_of(
    fates: Sequence[Fate], began_s: Mapping[str, float]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the middles of the parts of a run's time, and how many wait in each on average.

    Args:
        fates: of all requests.
        began_s: instants of their first steps, by their numbers.
    """
    let_in = [(f"{n}", one) for n, one in enumerate(fates) if one.end != "refused"]
    came = np.array([one.arrival.arrival_s for _, one in let_in])
    went = np.array([began_s.get(request_id, one.end_s) for request_id, one in let_in])
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


def _replicas(setting: Setting) -> dict[str, int]:
    """Replicas that are shown, some of every pool, with the most that they step together."""
    most_by_name = {
        f"{pool.name}-{number}": pool.asked.max_batch
        for pool in setting.pools
        for number in range(pool.asked.replicas)
    }
    names = list(most_by_name)
    places = np.unique(np.linspace(0, len(names) - 1, _MOST_REPLICAS).astype(int))
    return {names[place]: most_by_name[names[place]] for place in places.tolist()}


def _sizes(workload: Sequence[Arrival]) -> tuple[str, ...]:
    """The sizes that come most, the smallest first, and one name for all others."""
    counts = Counter((one.width_px, one.height_px) for one in workload)
    most = [size for size, _ in counts.most_common(_MOST_SIZES)]
    most.sort(key=lambda size: (size[0] * size[1], size))
    names = tuple(f"{width}x{height}" for width, height in most)
    return (*names, _OTHERS) if len(counts) > len(most) else names


def _bars(notes: Notes, workload: Sequence[Arrival], sizes: Sequence[str]) -> tuple[Bar, ...]:
    rows = {name: row for row, name in enumerate(notes.replicas)}
    bars = []
    for name, run in notes.shown:
        counts = Counter(_label(workload[int(one)], sizes) for one in run.request_ids)
        span = max(run.start_s, notes.begin_s), min(run.ends_s[-1], notes.end_s)
        most, num = notes.replicas[name], 0
        for size in sizes:
            low, num = num / most, num + counts[size]
            if counts[size]:
                bars.append(Bar(rows[name], *span, size, low, num / most))
    return tuple(bars)


def _busiest_s(arrivals_s: Floats) -> float:
    """The beginning of the two minutes in which most requests come."""
    if not len(arrivals_s):
        return 0.0
    ordered = np.sort(arrivals_s)
    counts = np.searchsorted(ordered, ordered + SHOWN_S) - np.arange(len(ordered))
    return float(min(ordered[counts.argmax()], max(0.0, ordered[-1] - SHOWN_S)))


def _label(one: Arrival, sizes: Sequence[str]) -> str:
    name = f"{one.width_px}x{one.height_px}"
    return name if name in sizes else _OTHERS


def waiting_plot(experiment: CellExperiment, excerpts: Sequence[CellExcerpt]) -> Plot:
    """Return who waits over time, one line for each load."""
    lines = {
        experiment.load_name(one.run.load): Line(one.times_s, one.waiting)
        for one in sorted(excerpts, key=lambda one: one.run.load)
    }
    title = f"{experiment.name}: {experiment.policies[0]}, seed {experiment.seeds[0]} (simulated)"
    y_label = "requests that were let in and wait"
    return Plot("waiting", title, "seconds", y_label, lines, is_ordered=True)


def timeline_of(experiment: CellExperiment, excerpts: Sequence[CellExcerpt]) -> Timeline:
    """Return which replica stepped which sizes when, at the middle load."""
    middle = sorted(excerpts, key=lambda one: one.run.load)[len(excerpts) // 2]
    return Timeline(
        "timeline",
        f"{experiment.name}: {middle.run.policy}, {experiment.load_name(middle.run.load)}, seed "
        f"{middle.run.seed} (simulated); a bar is as high as its batch is full",
        middle.replicas,
        middle.sizes,
        middle.bars,
    )
