"""Prepares and reports experiments on one group of GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

from ray_cluster.models.latency_profiles import load_profile
from ray_cluster.simulator.experiment import ExperimentTask
from ray_cluster.simulator.groups.experiment import (
    BOUND,
    SpCondition,
    SpExperiment,
    SpRow,
    SpUnit,
    run_unit,
    units_of,
)
from ray_cluster.simulator.groups.workload import FLUX_CLASSES
from ray_cluster.simulator.reports import Plot, Report, Table, Timeline, grid, percent_line
from ray_cluster.simulator.results import Mean, Rows

_ON_TIME = "on time, %"
# policies whose misses are shown by size: the guard of large requests, and none
_SHOWN_BY_SIZE = ("rounds/large", "best_static")


def prepare_groups(experiment: SpExperiment, folder: Path) -> ExperimentTask:
    """Return an experiment's simulations; errors as of :func:`units_of`."""
    units = units_of(experiment, folder)

    def sum_up(found: Iterable[Sequence[SpRow]]) -> Report:
        return report_groups(experiment, units, list(chain.from_iterable(found)))

    return ExperimentTask(experiment.name, [partial(run_unit, unit) for unit in units], sum_up)


def report_groups(
    experiment: SpExperiment, units: Sequence[SpUnit], found: Sequence[SpRow]
) -> Report:
    """Sum up the rows of all simulations of an experiment."""
    rows = Rows(found)
    kinds, seeds = load_profile(experiment.profile).kinds, experiment.seeds
    what = (
        f"{experiment.what} Simulated, {', '.join(kinds)} times ({experiment.profile}); "
        f"{experiment.num_gpus} GPUs, {experiment.num_arrivals} requests a run, seeds {seeds[0]} "
        f"to {seeds[-1]}, means with 95 % intervals. What is dropped or late is missed."
    )
    loads = [
        [SpCondition(mix, rate, scale) for scale in experiment.scales]
        for mix, rate in product(experiment.mixes, experiment.rates_per_min)
    ]
    figures = {
        "experiment": experiment.model_dump(mode="json"),
        "profile_kinds": list(kinds),
        "loads": [
            {
                "mix": cells[0].mix,
                "rate_per_min": cells[0].rate_per_min,
                "policy": policy,
                "attainment": rows.mean("attainment", policy, cells).as_figures(),
                "gain_of_first": rows.gain(
                    "attainment", experiment.policies[0], policy, cells
                ).as_figures(),
            }
            for cells in loads
            for policy in experiment.policies
        ],
        "cells": _cell_figures(experiment, units, rows),
    }
    return Report(
        experiment.name,
        what,
        [table for cells in loads for table in _tables(experiment, cells, rows)],
        _plots(experiment, loads, rows),
        _timeline(experiment, next(row for row in found if row.bars)),
        figures,
    )


def _tables(experiment: SpExperiment, cells: Sequence[SpCondition], rows: Rows) -> list[Table]:
    """Of one mix and rate."""
    first, *others = experiment.policies
    load, by_scale = cells[0].load_words, {f"{cell.scale:g}": cell for cell in cells}

    def mean(policy: str, some: Sequence[SpCondition]) -> Mean:
        return rows.mean("attainment", policy, some)

    def gain(policy: str, some: Sequence[SpCondition]) -> str:
        return rows.gain("attainment", first, policy, some).as_points()

    means = [
        [one, mean(one, cells).as_points(), "" if one == first else gain(one, cells)]
        for one in experiment.policies
    ]
    title = f"{load}: on time, %, mean over scales, paired by seed (simulated)"
    tables = [
        Table(title, ["policy", "on time", f"{first} gains"], means),
        grid(
            f"{load}: on time, %, by scale of the deadlines (simulated)",
            "scale",
            by_scale,
            experiment.policies,
            lambda policy, cell: f"{100 * mean(policy, [cell]).value:.1f}",
        ),
    ]
    if others:
        title = f"{load}: points that {first} gains over others, paired by seed (simulated)"
        tables.append(
            grid(title, "scale", by_scale, others, lambda policy, cell: gain(policy, [cell]))
        )
    shown = [one for one in experiment.policies if one == first or one in _SHOWN_BY_SIZE]
    body = []
    for cell in cells:
        by_size = [rows.class_means(policy, cell) for policy in shown]
        for side in (str(one.side_px) for one in FLUX_CLASSES):
            points = [one[side].as_points() if side in one else "" for one in by_size]
            body.append([f"{cell.scale:g}", side, *points])
    title = f"{load}: on time, %, by size (simulated)"
    return [*tables, Table(title, ["scale", "px", *shown], body)]


def _cell_figures(
    experiment: SpExperiment, units: Sequence[SpUnit], rows: Rows
) -> list[dict[str, Any]]:
    """Every policy in every cell, with its samples in the order of the seeds."""

    def samples(figure: str, policy: str, cell: SpCondition, digits: int) -> list[float]:
        return [round(one, digits) for one in rows.samples(figure, policy, [cell])]

    policies_by_cell = {unit.cell: unit.policies for unit in units}
    return [
        {
            **asdict(cell),
            "policy": policy,
            "stands_for": policies_by_cell[cell][policy],
            "attainment": rows.mean("attainment", policy, [cell]).as_figures(),
            "by_class": {
                name: mean.as_figures() for name, mean in rows.class_means(policy, cell).items()
            },
            "samples": samples("attainment", policy, cell, 5),
            "gpu_s_per_request": samples("gpu_s", policy, cell, 4),
            "switches_per_request": samples("num_switches", policy, cell, 4),
        }
        for cell in experiment.cells
        for policy in experiment.policies
    ]


def _plots(
    experiment: SpExperiment, loads: Sequence[Sequence[SpCondition]], rows: Rows
) -> list[Plot]:
    """Over scales; over sizes, and over rates if there are several, at the middle scale."""
    scale, rates = experiment.middle_scale, sorted(experiment.rates_per_min)

    def plot(
        name: str, title: str, x_label: str, x: Sequence[float], cells: Sequence[SpCondition]
    ) -> Plot:
        lines = {
            policy: percent_line(x, [rows.mean("attainment", policy, [cell]) for cell in cells])
            for policy in experiment.policies
        }
        return Plot(name, f"{title} (simulated)", x_label, {_ON_TIME: lines})

    plots = []
    for cells in map(sorted, loads):
        scales = [cell.scale for cell in cells]
        name = f"{_file(cells[0])}-scales"
        plots.append(plot(name, cells[0].load_words, "scale of the deadlines", scales, cells))
    plots += [_over_sizes(experiment, cells[0], rows) for cells in loads]
    if len(rates) > 1:
        for mix in experiment.mixes:
            cells = [SpCondition(mix, rate, scale) for rate in rates]
            title = f"{mix}, scale {scale:g}"
            plots.append(plot(f"{mix}-rates", title, "requests per minute", rates, cells))
    return plots


def _over_sizes(experiment: SpExperiment, load: SpCondition, rows: Rows) -> Plot:
    cell, lines = replace(load, scale=experiment.middle_scale), {}
    for policy in experiment.policies:
        if policy != BOUND:
            means = rows.class_means(policy, cell)
            sides = sorted(map(int, means))
            lines[policy] = percent_line(sides, [means[str(side)] for side in sides])
    title = f"{cell.load_words}, scale {cell.scale:g} (simulated)"
    return Plot(f"{_file(cell)}-sizes", title, "side of the images, px", {_ON_TIME: lines})


def _file(cell: SpCondition) -> str:
    return f"{cell.mix}-{cell.rate_per_min:g}-per-min"


def _timeline(experiment: SpExperiment, row: SpRow) -> Timeline:
    """The beginning of one simulation: a row for each GPU, coloured by size."""
    cell = row.load
    title = (
        f"{row.policy}: which request has which GPU (simulated); {cell.load_words}, scale "
        f"{cell.scale:g}, seed {row.seed}"
    )
    rows = [f"GPU {number}" for number in range(experiment.num_gpus)]
    return Timeline(title, rows, [f"{one.side_px} px" for one in FLUX_CLASSES], row.bars)
