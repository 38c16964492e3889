"""The results of a comparison as sections of tables, aims and problems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.report import Section
from benchmarks.serving.compare.figures import Attainments
from benchmarks.serving.compare.outcomes import FATES, latencies_s
from benchmarks.serving.compare.prediction import Prediction
from benchmarks.serving.compare.results import ComparedCell, Figures, ResultStore
from benchmarks.serving.compare.settings import Settings
from benchmarks.serving.compare.traces import Trace
from benchmarks.serving.contenders import BASELINES, CONTENDERS
from benchmarks.stats import percentile
from benchmarks.verdicts import Aim, at_least, at_most

OURS = "ours"
GOODPUT_LEVEL = 0.9
STRAINED_LEVEL = 0.6
GOODPUT_RATIO = 2.0
PREDICTION_POINTS = 5.0


class Summary:
    """Finished runs, ready to be summed up.

    Args:
        rate_per_s: of load 1.
        predictions: of the simulator, by contender.
    """

    def __init__(
        self,
        settings: Settings,
        traces: Sequence[Trace],
        store: ResultStore,
        *,
        rate_per_s: float,
        predictions: Mapping[str, Sequence[Prediction]],
    ) -> None:
        self._contenders = settings.contenders
        self._store = store
        self._rate_per_s = rate_per_s
        self._predictions = predictions
        self._loads = sorted(settings.loads)
        self._baselines = [name for name in settings.contenders if name in BASELINES]
        # only traces that all contenders have had at every load: anything else is not paired
        self.traces = [one.name for one in traces if self._is_complete(one.name)]

    def _is_complete(self, trace: str) -> bool:
        return all(
            ComparedCell(name, load, trace) in self._store
            for name in self._contenders
            for load in self._loads
        )

    def sections(self) -> dict[str, Section]:
        """Return a section for all traces, one for each process, and one of counts."""
        processes = {name.rpartition("-")[0] for name in self.traces}
        groups = {"all traces": self.traces} | {
            f"{process} traces": [name for name in self.traces if name.startswith(process)]
            for process in sorted(processes, reverse=True)
            if len(processes) > 1
        }
        found = {name: self._group(name, traces) for name, traces in groups.items()}
        return found | {"runs": self._runs()}

    def _rows(self, contender: str, load: float, traces: Sequence[str]) -> list[Figures]:
        return [self._store[ComparedCell(contender, load, trace)] for trace in traces]

    def attainments(self, traces: Sequence[str]) -> Attainments:
        """Return the shares in time on some traces."""
        by_contender = {
            name: np.array(
                [
                    [row["attainment"] for row in self._rows(name, load, traces)]
                    for load in self._loads
                ]
            )
            for name in self._contenders
        }
        return Attainments(self._loads, by_contender)

    def _group(self, group: str, traces: Sequence[str]) -> Section:
        shares = self.attainments(traces)
        rows, aims = [], []
        for index, load in enumerate(self._loads):
            best = shares.best(self._baselines, index) if self._baselines else None
            for name in self._contenders:
                row: Figures = {"load": load, "per_s": load * self._rate_per_s, "contender": name}
                live = shares.at(name, index)
                row["in_time_percent"] = live.as_dict(100)
                if best is not None and name not in self._baselines:
                    row["points_over_best_baseline"] = shares.gain(name, best, index).as_dict(100)
                    row["best_baseline"] = best
                expected = self._expected(name, load, traces)
                if expected is not None:
                    row["predicted_percent_simulated"] = 100 * expected
                    # the prediction may be off by some points, or by the live interval
                    sure = max(PREDICTION_POINTS, 50 * (live.high - live.low))
                    off = 100 * abs(expected - live.value)
                    what = f"{group}: simulated beside live, {name}, load {load:g}"
                    aims.append(at_most(what, sure, off, (off, off), "points"))
                rows.append(row)
        goodput = [
            {
                "contender": name,
                "load": str(shares.crossing(name, GOODPUT_LEVEL)),
                "per_s": self._rate_per_s * shares.crossing(name, GOODPUT_LEVEL).load,
            }
            for name in self._contenders
        ]
        notes: list[str] = []
        if self._baselines and OURS in self._contenders:
            for note, aim in _headlines(group, shares, self._baselines):
                notes.append(note)
                aims += [aim] if aim else []
        return {
            "what": f"{len(traces)} traces; intervals of 95 %, bootstrap over traces",
            "tables": {"in time": rows, "goodput: 90 % in time up to": goodput},
            "notes": notes,
            "aims": [aim.as_dict() for aim in aims],
        }

    def _expected(self, contender: str, load: float, traces: Sequence[str]) -> float | None:
        found = [
            one.attainment
            for one in self._predictions.get(contender, ())
            if one.load == load and one.trace in traces
        ]
        return float(np.mean(found)) if found else None

    def _runs(self) -> Section:
        rows = [self._run(name, load) for load in self._loads for name in self._contenders]
        lost = [row for row in rows if not row["nothing_lost"]]
        return {
            "what": "what became of requests, all traces together; of the client and of others "
            "(processes that have nothing to do with the comparison) the worst run",
            "tables": {
                "requests": rows,
                "contenders": [
                    {"contender": name, "what": CONTENDERS[name].what} for name in self._contenders
                ],
            },
            "problems": [f"{row['contender']} lost requests at load {row['load']}" for row in lost],
        }

    def _run(self, contender: str, load: float) -> Figures:
        rows = self._rows(contender, load, self.traces)
        fates: Counter[str] = Counter()
        for row in rows:
            fates.update(row["fates"])
        seconds = [one for row in rows for one in latencies_s(row)]
        return {
            "load": load,
            "contender": contender,
            **{fate: fates[fate] for fate in FATES},
            **{f"p{p}_s": percentile(seconds, p) if seconds else None for p in (50, 95, 99)},
            "nothing_lost": all(row["accounts"]["nothing_lost"] for row in rows),
            "client_cores": max(row["client_cpu_share"] for row in rows),
            "client_late_s": max(row["client_late_send_max_s"] for row in rows),
            "cores_of_others": max(row["cores_of_others"] for row in rows),
        }


def _headlines(
    group: str, shares: Attainments, baselines: Sequence[str]
) -> Iterator[tuple[str, Aim | None]]:
    """Yield ours beside the best baseline as a note, with its aim where the level was reached."""
    best = shares.best_at(baselines, GOODPUT_LEVEL)
    theirs, ours = (shares.crossing(name, GOODPUT_LEVEL) for name in (best, OURS))
    if ours.bound == "below":
        yield "goodput: ours has less than 90 % in time at every load that was tried", None
    elif theirs.bound == "above":
        yield f"goodput: {best} has 90 % in time at every load that was tried", None
    else:
        ratio = shares.goodput_ratio(OURS, best, GOODPUT_LEVEL)
        is_least = bool(theirs.bound or ours.bound)
        more = ", or more: the level was not reached at the loads that were tried"
        note = (
            f"goodput: {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}) times that of {best}"
        )
        what = f"{group}: goodput at 90 % in time, over {best}"
        interval = (ratio.low, math.inf if is_least else ratio.high)
        aim = at_least(what, GOODPUT_RATIO, ratio.value, interval, "x")
        yield note + (more if is_least else ""), aim
    strained = shares.best_at(baselines, STRAINED_LEVEL)
    where, there = shares.where(strained, STRAINED_LEVEL, OURS)
    if where.bound:
        side = "less" if where.bound == "below" else "more"
        yield f"{strained} has {side} than 60 % in time at every load that was tried", None
    else:
        value, low, high = (100 * one for one in (there.value, there.low, there.high))
        what = f"{group}: ours in time where {strained} has 60 %"
        yield (
            f"{strained} has 60 % in time at load {where}; ours has {value:.1f} % there",
            at_least(what, 100 * GOODPUT_LEVEL, value, (low, high), "%"),
        )
