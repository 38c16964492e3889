"""Tables and plots of experiments on one group of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray_cluster.models.profiles import load_profile
from ray_cluster.simulator.reports import Report, Table
from ray_cluster.simulator.sp_compare import class_attainment, mean_attainment, paired_gain
from ray_cluster.simulator.sp_excerpt import Excerpt, timeline_of
from ray_cluster.simulator.sp_experiment import SpCondition, SpExperiment, SpRow, Unit
from ray_cluster.simulator.sp_file import SpFile
from ray_cluster.simulator.sp_plots import over_classes, over_rates, over_scales
from ray_cluster.simulator.sp_tuning import BEST_STATIC

_GUARDED = "rounds/large"


@dataclass(frozen=True)
class Load:
    """A mix and a rate: its cells, one for each scale, and what was found in them."""

    name: str
    cells: Sequence[SpCondition]
    rows: Sequence[SpRow]


def report_groups(
    file: SpFile, units: Sequence[Unit], found: Sequence[SpRow], excerpt: Excerpt
) -> Report:
    """Sum up all simulations of an experiment.

    Args:
        file: which experiment it was.
        units: its workloads.
        found: their rows.
        excerpt: what to show of one simulation.
    """
    experiment = file.experiment()
    loads = _loads(experiment, found)
    kinds = load_profile(file.profile).kinds
    what = (
        f"{file.what} Simulated, {', '.join(kinds)} times ({file.profile}); {file.num_gpus} GPUs, "
        f"{file.num_arrivals} requests a run, seeds {experiment.seeds[0]} to "
        f"{experiment.seeds[-1]}, means with 95 % intervals. What is dropped or late is missed."
    )
    tables = [table for load in loads for table in _tables(experiment, load)]
    plots = [over_scales(experiment, load.cells, load.rows) for load in loads]
    plots += [over_classes(experiment, load.cells, load.rows) for load in loads]
    if len(experiment.rates_per_min) > 1:
        plots += [over_rates(experiment, mix, found) for mix in experiment.mixes]
    figures = {
        "experiment": file.model_dump(mode="json"),
        "profile_kinds": list(kinds),
        "loads": [one for load in loads for one in _load_figures(experiment, load)],
        "cells": _cell_figures(units, found),
    }
    return Report(file.name, what, tables, plots, [timeline_of(excerpt)], figures)


def _loads(experiment: SpExperiment, found: Sequence[SpRow]) -> list[Load]:
    loads = []
    for mix in experiment.mixes:
        for rate in experiment.rates_per_min:
            cells = [SpCondition(mix, rate, scale) for scale in experiment.scales]
            rows = [row for row in found if (row.cell.mix, row.cell.rate_per_min) == (mix, rate)]
            loads.append(Load(f"{mix}, {rate:g} per minute", cells, rows))
    return loads


def _tables(experiment: SpExperiment, load: Load) -> list[Table]:
    tables = [_means(experiment, load), _by_scale(experiment, load)]
    if len(experiment.policies) > 1:
        tables.append(_gains_by_scale(experiment, load))
    return [*tables, _by_class(experiment, load)]


def _means(experiment: SpExperiment, load: Load) -> Table:
    first = experiment.policies[0]
    body = [
        [
            policy,
            mean_attainment(load.rows, policy, load.cells).as_points(),
            ""
            if policy == first
            else paired_gain(load.rows, first, policy, load.cells).as_points(),
        ]
        for policy in experiment.policies
    ]
    title = f"{load.name}: on time, %, mean over scales, paired by seed (simulated)"
    return Table(title, ["policy", "on time", f"{first} gains"], body)


def _by_scale(experiment: SpExperiment, load: Load) -> Table:
    body = [
        [
            f"{cell.scale:g}",
            *(
                f"{100 * mean_attainment(load.rows, policy, [cell]).value:.1f}"
                for policy in experiment.policies
            ),
        ]
        for cell in load.cells
    ]
    title = f"{load.name}: on time, %, by scale of the deadlines (simulated)"
    return Table(title, ["scale", *experiment.policies], body)


def _gains_by_scale(experiment: SpExperiment, load: Load) -> Table:
    first, *others = experiment.policies
    body = [
        [
            f"{cell.scale:g}",
            *(paired_gain(load.rows, first, policy, [cell]).as_points() for policy in others),
        ]
        for cell in load.cells
    ]
    title = f"{load.name}: points that {first} gains over others, paired by seed (simulated)"
    return Table(title, ["scale", *others], body)


def _by_class(experiment: SpExperiment, load: Load) -> Table:
    """Who bears the misses: under ours, with the guard of large requests, and without either."""
    wanted = (experiment.policies[0], _GUARDED, BEST_STATIC)
    policies = [one for one in experiment.policies if one in wanted]
    body = []
    for cell in load.cells:
        means = {policy: class_attainment(load.rows, policy, cell) for policy in policies}
        for size in experiment.classes:
            name = str(size.side_px)
            points = [
                means[one][name].as_points() if name in means[one] else "" for one in policies
            ]
            body.append([f"{cell.scale:g}", name, *points])
    title = f"{load.name}: on time, %, by size (simulated)"
    return Table(title, ["scale", "px", *policies], body)


def _load_figures(experiment: SpExperiment, load: Load) -> list[dict[str, Any]]:
    first = experiment.policies[0]
    return [
        {
            "mix": load.cells[0].mix,
            "rate_per_min": load.cells[0].rate_per_min,
            "policy": policy,
            "attainment": mean_attainment(load.rows, policy, load.cells).as_figures(),
            "gain_of_first": paired_gain(load.rows, first, policy, load.cells).as_figures(),
        }
        for policy in experiment.policies
    ]


def _cell_figures(units: Sequence[Unit], found: Sequence[SpRow]) -> list[dict[str, Any]]:
    """Every policy in every cell, with its samples in the order of the seeds."""
    rows: dict[tuple[str, SpCondition], list[SpRow]] = {}
    for row in sorted(found, key=lambda one: one.seed):
        rows.setdefault((row.policy, row.cell), []).append(row)
    stands_for = {(label, unit.cell): name for unit in units for label, name in unit.policies}
    return [
        {
            "mix": cell.mix,
            "rate_per_min": cell.rate_per_min,
            "scale": cell.scale,
            "policy": policy,
            "stands_for": stands_for[policy, cell],
            "attainment": mean_attainment(own, policy, [cell]).as_figures(),
            "by_class": {
                name: mean.as_figures()
                for name, mean in class_attainment(own, policy, cell).items()
            },
            "samples": [round(one.attainment, 5) for one in own],
            "gpu_s_per_request": [round(one.gpu_s, 4) for one in own],
            "switches_per_request": [round(one.num_switches, 4) for one in own],
        }
        for (policy, cell), own in rows.items()
    ]
