"""Everything that the runs of a comparison show, as one mapping for JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks.serving.compare.cells import CellStore, ComparedCell
from benchmarks.serving.compare.contenders import BASELINES
from benchmarks.serving.compare.figures import Attainments
from benchmarks.serving.compare.outcomes import FATES, made_latencies_s
from benchmarks.serving.compare.pace import LivePace
from benchmarks.serving.compare.prediction import Prediction
from benchmarks.serving.compare.settings import Settings
from benchmarks.serving.compare.traces import Trace
from benchmarks.stats import percentile
from benchmarks.verdicts import Aim, at_least, at_most

Figures = dict[str, Any]
OURS = "ours"
GOODPUT_LEVEL = 0.9
STRAINED_LEVEL = 0.6
GOODPUT_RATIO = 2.0
PREDICTION_POINTS = 5.0
# of each run; the rest is in the lines of the store
_KEPT = ("contender", "load", "trace", "attainment", "fates", "cores_of_others", "commit")


class Summary:
    """Finished runs, ready to be summed up.

    Args:
        settings: of the comparison.
        traces: of it.
        store: its finished runs.
        predictions: of the simulator, by contender.
        paces: what it expects once it has seen the service at the lowest load, likewise.
    """

    def __init__(
        self,
        settings: Settings,
        traces: Sequence[Trace],
        store: CellStore,
        predictions: Mapping[str, Sequence[Prediction]],
        paces: Mapping[str, LivePace],
    ) -> None:
        self._settings = settings
        self._store = store
        self._predictions = predictions
        self._paces = paces
        self._loads = sorted(settings.loads)
        # what all contenders have had at every load: anything else would not be paired
        self._traces = [one.name for one in traces if self._is_complete(one.name)]
        self._baselines = [name for name in settings.contenders if name in BASELINES]

    @property
    def traces(self) -> list[str]:
        """The traces that all contenders have had at all loads."""
        return self._traces

    def groups(self) -> dict[str, list[str]]:
        """Return the traces by process, and all together if there are several."""
        found: dict[str, list[str]] = {
            str(process): [name for name in self._traces if name.startswith(f"{process}-")]
            for process in self._settings.processes
        }
        found = {process: names for process, names in found.items() if names}
        return {"all": self._traces, **found} if len(found) > 1 else found

    def as_dict(self) -> Figures:
        """Return all figures."""
        return {
            "groups": {name: self._group(traces) for name, traces in self.groups().items()},
            "runs": [self._run(name, load) for load in self._loads for name in self._contenders],
            "cells": [
                {key: row[key] for key in _KEPT}
                for load in self._loads
                for name in self._contenders
                for row in self._rows(name, load, self._traces)
            ],
        }

    @property
    def _contenders(self) -> tuple[str, ...]:
        return self._settings.contenders

    def _is_complete(self, trace: str) -> bool:
        return all(
            ComparedCell(name, load, trace) in self._store
            for name in self._contenders
            for load in self._loads
        )

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

    def _group(self, traces: Sequence[str]) -> Figures:
        shares = self.attainments(traces)
        rows = []
        for index, load in enumerate(self._loads):
            best = shares.best(self._baselines, index) if self._baselines else None
            for name in self._contenders:
                row: Figures = {"contender": name, "load": load}
                row["attainment"] = asdict(shares.at(name, index))
                if best is not None and name not in self._baselines:
                    row["over"] = best
                    row["gain"] = asdict(shares.gain(name, best, index))
                alone, pace = self._predictions.get(name, ()), self._paces.get(name)
                if (expected := _expected(alone, load, traces)) is not None:
                    row["simulated"] = expected
                if pace and (expected := _expected(pace.predictions, load, traces)) is not None:
                    row["simulated_at_pace"] = expected
                rows.append(row)
        crossings = {
            name: asdict(shares.crossing(name, GOODPUT_LEVEL)) for name in self._contenders
        }
        found: Figures = {"traces": list(traces), "rows": rows, "goodput": crossings}
        if self._baselines and OURS in self._contenders:
            found["headline"] = self._headline(shares)
        return found

    def _headline(self, shares: Attainments) -> Figures:
        """Ours beside the baseline that does best at that very figure."""
        goodput = max(
            self._baselines,
            key=lambda name: (
                shares.crossing(name, GOODPUT_LEVEL).load,
                float(shares.mean(name).mean()),
            ),
        )
        strained = max(
            self._baselines,
            key=lambda name: (
                shares.crossing(name, STRAINED_LEVEL).load,
                float(shares.mean(name).mean()),
            ),
        )
        where, there = shares.where(strained, STRAINED_LEVEL, OURS)
        return {
            "goodput_of": goodput,
            "goodput_theirs": asdict(shares.crossing(goodput, GOODPUT_LEVEL)),
            "goodput_ours": asdict(shares.crossing(OURS, GOODPUT_LEVEL)),
            "goodput_ratio": asdict(shares.goodput_ratio(OURS, goodput, GOODPUT_LEVEL)),
            "strained": strained,
            "strained_load": asdict(where),
            "ours_there": asdict(there),
        }

    def _run(self, contender: str, load: float) -> Figures:
        """Counts, latencies and the client over all traces."""
        rows = self._rows(contender, load, self._traces)
        fates: Counter[str] = Counter()
        latencies: list[float] = []
        for row in rows:
            fates.update(row["fates"])
            latencies += made_latencies_s(row)
        return {
            "contender": contender,
            "load": load,
            "requests": sum(fates.values()),
            "fates": {fate: fates[fate] for fate in FATES},
            "latency_s": {
                f"p{percent}": percentile(latencies, percent) if latencies else None
                for percent in (50, 95, 99)
            },
            "nothing_lost": all(row["books"]["nothing_lost"] for row in rows),
            "client_cpu_share": max((row["client"]["cpu_share"] for row in rows), default=0.0),
            "client_late_send_max_s": max(
                (row["client"]["late_send_max_s"] for row in rows), default=0.0
            ),
            "cores_of_others": max((row["cores_of_others"] for row in rows), default=0.0),
        }


def _expected(
    predictions: Sequence[Prediction], load: float, traces: Sequence[str]
) -> float | None:
    found = [one.attainment for one in predictions if one.load == load and one.trace in traces]
    return float(np.mean(found)) if found else None


def aims_of(figures: Figures) -> list[Aim]:
    """Return the aims beside what was found, for each group of traces.

    What was not reached at the loads that were tried has no figure.
    """
    aims: list[Aim] = []
    for name, group in figures["groups"].items():
        if "headline" in group:
            aims += _headline_aims(name, group["headline"])
        aims += _prediction_aims(name, group)
    return aims


def _headline_aims(name: str, headline: Figures) -> Iterator[Aim]:
    is_known = headline["goodput_theirs"]["bound"] != "above"
    if headline["goodput_ours"]["bound"] != "below" and is_known:
        what = f"{name}: goodput at 90 % in time, over {headline['goodput_of']}"
        ratio = headline["goodput_ratio"]
        is_least = headline["goodput_theirs"]["bound"] or headline["goodput_ours"]["bound"]
        interval = (ratio["low"], math.inf if is_least else ratio["high"])
        yield at_least(what, GOODPUT_RATIO, ratio["value"], interval, "x")
    if not headline["strained_load"]["bound"]:
        what = f"{name}: ours in time where {headline['strained']} has 60 %"
        low, value, high = (100 * headline["ours_there"][key] for key in ("low", "value", "high"))
        yield at_least(what, 100 * GOODPUT_LEVEL, value, (low, high), "%")


def _prediction_aims(name: str, group: Figures) -> Iterator[Aim]:
    """Whether simulated and live attainment differ by no more than some points, or than the live
    one is sure."""
    kinds = {"simulated": "simulated", "simulated_at_pace": "simulated at the pace seen"}
    for row in group["rows"]:
        for key, words in kinds.items():
            if key in row:
                live = row["attainment"]
                off = 100 * abs(row[key] - live["value"])
                sure = 100 * (live["high"] - live["low"]) / 2
                what = f"{name}: {words} beside live, {row['contender']}, load {row['load']:g}"
                yield at_most(what, max(PREDICTION_POINTS, sure), off, (off, off), "points")
