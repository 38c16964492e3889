"""Tables and plots of experiments on replicas of one device each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_runs import CellRow, Setting
from ray_cluster.simulator.intervals import Mean, mean_of, paired_difference
from ray_cluster.simulator.reports import Line, Plot, Report, Table

# the policy that refuses, and the same one that lets everybody in
_REFUSING, _OPEN = "deadline", "deadline/open"

Rows = Mapping[tuple[str, float], Sequence[CellRow]]


def report_cells(experiment: CellExperiment, found: Sequence[CellRow]) -> Report:
    """Sum up all simulations of an experiment."""
    rows: defaultdict[tuple[str, float], list[CellRow]] = defaultdict(list)
    for row in sorted(found, key=lambda one: one.run.seed):
        rows[row.run.policy, row.run.rate_per_s].append(row)
    setting = Setting.of(experiment)
    error = setting.fitted.error
    what = (
        f"{experiment.what} Simulated, {', '.join(setting.kinds)} times ({experiment.profile}, "
        f"linear in a batch's pixels: off by {error.mean:.1%} on average and {error.worst:.1%} at "
        f"most); {experiment.replicas} replicas, {experiment.duration_s:g} s of arrivals, seeds "
        f"{experiment.seeds[0]} to {experiment.seeds[-1]}, means with 95 % intervals."
    )
    tables = [_attainment(experiment, rows), _differences(experiment, rows)]
    tables += [_classes(experiment, rows), _refusals(experiment, rows)]
    figures = {
        "experiment": experiment.model_dump(mode="json"),
        "profile_kinds": list(setting.kinds),
        "cells": [
            {
                "policy": policy,
                "rate_per_s": rate,
                "attainment": _mean(rows[policy, rate]).as_figures(),
                "refused": mean_of([one.refused for one in rows[policy, rate]]).as_figures(),
                "broken": mean_of([one.broken for one in rows[policy, rate]]).as_figures(),
                "samples": [round(one.attainment, 5) for one in rows[policy, rate]],
            }
            for policy in experiment.policies
            for rate in experiment.rates_per_s
        ],
    }
    return Report(experiment.name, what, tables, [_plot(experiment, rows)], figures=figures)


def _mean(rows: Sequence[CellRow]) -> Mean:
    return mean_of([one.attainment for one in rows])


def _attainment(experiment: CellExperiment, rows: Rows) -> Table:
    body = [
        [f"{rate:g}", *(_mean(rows[policy, rate]).as_points() for policy in experiment.policies)]
        for rate in experiment.rates_per_s
    ]
    return Table("Done in time, % (simulated)", ["per second", *experiment.policies], body)


def _differences(experiment: CellExperiment, rows: Rows) -> Table:
    first, *others = experiment.policies
    body = [
        [f"{rate:g}", *(_gain(rows[first, rate], rows[policy, rate]) for policy in others)]
        for rate in experiment.rates_per_s
    ]
    title = f"Points that {first} gains over others, paired by seed (simulated)"
    return Table(title, ["per second", *others], body)


def _gain(mine: Sequence[CellRow], theirs: Sequence[CellRow]) -> str:
    return paired_difference(
        [one.attainment for one in mine], [one.attainment for one in theirs]
    ).as_points()


def _classes(experiment: CellExperiment, rows: Rows) -> Table:
    sizes = [size.name for size in experiment.sizes]
    body = [
        [
            policy,
            f"{rate:g}",
            *(
                mean_of(
                    [one.attainment_by_class.get(size, 1.0) for one in rows[policy, rate]]
                ).as_points()
                for size in sizes
            ),
        ]
        for policy in experiment.policies[:2]
        for rate in experiment.rates_per_s
    ]
    return Table("By size, % (simulated)", ["policy", "per second", *sizes], body)


def _refusals(experiment: CellExperiment, rows: Rows) -> Table:
    """What a refusal costs those who would have been in time without any."""
    body = []
    for rate in experiment.rates_per_s:
        mine = rows.get((_REFUSING, rate), ())
        cells = (
            [
                mean_of([one.refused for one in mine]).as_points(),
                mean_of([one.broken for one in mine]).as_points(),
            ]
            if mine
            else ["", ""]
        )
        open_rows = rows.get((_OPEN, rate), ())
        false = [_false_refusals(a, b) for a, b in zip(mine, open_rows, strict=False)]
        cells.append(mean_of(false).as_points() if false else "")
        body.append([f"{rate:g}", *cells])
    columns = ["per second", "refused", "let in and late", "refused, in time if all were let in"]
    return Table(f"Refusals of {_REFUSING}, % of arrivals (simulated)", columns, body)


def _false_refusals(refusing: CellRow, open_row: CellRow) -> float:
    pairs = list(zip(refusing.let_in, open_row.met, strict=True))
    return sum(let_in == "0" and met == "1" for let_in, met in pairs) / max(1, len(pairs))


def _plot(experiment: CellExperiment, rows: Rows) -> Plot:
    lines = {}
    for policy in experiment.policies:
        means = [_mean(rows[policy, rate]) for rate in experiment.rates_per_s]
        lines[policy] = Line(
            experiment.rates_per_s,
            [100 * one.value for one in means],
            [100 * one.half_width for one in means],
        )
    return Plot(
        "attainment",
        f"{experiment.name}: simulated",
        "requests per second",
        "done in time, %",
        lines,
    )
