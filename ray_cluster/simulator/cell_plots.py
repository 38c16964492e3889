"""Plots of experiments on replicas of one device each, over their loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_runs import CellRow
from ray_cluster.simulator.intervals import Mean, mean_of
from ray_cluster.simulator.reports import Line, Plot

Rows = Mapping[tuple[str, float], Sequence[CellRow]]
"""By policy and load, in the order of the seeds."""


def attainment_plot(experiment: CellExperiment, rows: Rows) -> Plot:
    """Return what each policy attains over the loads."""
    lines = {
        policy: _line(
            experiment,
            [
                mean_of([one.attainment for one in rows[policy, load]])
                for load in sorted(experiment.loads)
            ],
        )
        for policy in experiment.policies
    }
    return _plot(experiment, "attainment", f"{experiment.name} (simulated)", lines)


def classes_plot(experiment: CellExperiment, rows: Rows, classes: Sequence[str]) -> Plot:
    """Return what each class attains over the loads under the first policy."""
    policy = experiment.policies[0]
    lines = {
        name: _line(
            experiment,
            [class_mean(rows[policy, load], name) for load in sorted(experiment.loads)],
        )
        for name in classes
    }
    title = f"{experiment.name}: {policy}, by class (simulated)"
    return _plot(experiment, "classes", title, lines)


def class_mean(rows: Sequence[CellRow], name: str) -> Mean:
    """Return what a class attains; seeds in which nobody of it came count as all in time."""
    return mean_of([one.attainment_by_class.get(name, 1.0) for one in rows])


def _plot(experiment: CellExperiment, name: str, title: str, lines: Mapping[str, Line]) -> Plot:
    x_label = "requests per second" if experiment.trace is None else "speed of the replay"
    if experiment.night is not None:
        x_label += " at the peak"
    return Plot(name, title, x_label, "done in time, %", lines)


def _line(experiment: CellExperiment, means: Sequence[Mean]) -> Line:
    return Line(
        sorted(experiment.loads),
        [100 * one.value for one in means],
        [100 * one.half_width for one in means],
    )
