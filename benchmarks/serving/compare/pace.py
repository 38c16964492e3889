"""How much longer everything takes in service than alone: seen at one load, for the others.

A profile is measured with nothing else in the process. In service, threads that encode, decode and
report share its interpreter and the machine's caches, and the first step of each composition makes
kernels. One factor for all of it is found at one load; what it is worth shows at the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.serving.compare.prediction import Prediction, Simulated, predict, settings_of
from benchmarks.serving.compare.traces import Trace
from ray_cluster.models.profiles import load_profile, save_profile
from ray_cluster.policies.latency import LatencyProfile
from ray_cluster.simulator.cell_runs import simulate_cell

_RANGE = (0.5, 4.0)
# to within 0.3 %
_HALVINGS = 10


@dataclass(frozen=True, slots=True)
class LivePace:
    """What the simulator expects once it has seen the service at one load.

    Attributes:
        load: at which it was seen.
        factor: how many times as long as the profile says everything takes.
        predictions: of the other loads.
    """

    load: float
    factor: float
    predictions: tuple[Prediction, ...]


def predict_at_pace(
    folder: Path,
    traces: Sequence[Trace],
    loads: Sequence[float],
    simulated: Simulated,
    *,
    live_s: float,
) -> LivePace:
    """See the service's pace at the lowest load and simulate the others with it.

    Args:
        folder: of the comparison; the slower profile stays there.
        traces: that were run at the lowest load.
        loads: at least two.
        simulated: the contender, with the profile as it was measured.
        live_s: seconds from the planned arrival to the answer of the images that the service made
            of these traces at the lowest load, in the mean.
    """
    seen, *others = sorted(loads)
    measured = load_profile(simulated.profile)
    path = simulated.profile.with_name(f"{simulated.profile.stem}-in-service.yaml")
    slower = replace(simulated, profile=path)
    low, high = _RANGE
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        save_profile(path, times(measured, middle))
        is_short = mean_latency_s(folder, traces, seen, slower) < live_s
        low, high = (middle, high) if is_short else (low, middle)
    factor = math.sqrt(low * high)
    save_profile(path, times(measured, factor))
    return LivePace(seen, factor, tuple(predict(folder, traces, others, slower)))


def times(profile: LatencyProfile, factor: float) -> LatencyProfile:
    """Return a profile in which everything takes so many times as long."""
    rows = (
        replace(row, seconds=factor * row.seconds, source=f"{row.source}; {factor:.3f} times")
        for row in profile.rows
    )
    return replace(profile, rows=tuple(rows))


def mean_latency_s(
    folder: Path, traces: Sequence[Trace], load: float, simulated: Simulated
) -> float:
    """Return the seconds from arrival to end of simulated images that were made."""
    return float(
        np.mean(
            [
                fate.end_s - fate.arrival.arrival_s
                for _, setting in settings_of(folder, traces, [load], simulated)
                for run in setting.experiment.runs()
                for fate in simulate_cell(setting, run).fates
                if fate.end == "finished"
            ]
        )
    )
