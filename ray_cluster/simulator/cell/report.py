"""Prepares and reports experiments on replicas of one device each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ray_cluster.simulator.cell.experiment import CellExperiment
from ray_cluster.simulator.cell.runs import CellRow, Setting, run_cell
from ray_cluster.simulator.cell.views import CellView
from ray_cluster.simulator.experiment import ExperimentTask
from ray_cluster.simulator.reports import Line, Plot, Report, Table, Timeline, grid, percent_line
from ray_cluster.simulator.results import Mean, Rows, mean_of

# policies that refuse; of them, the one that is there without refusals, too
_REFUSING = ("deadline", "deadline/one-size")
_SERVICES = "deadline/services/"
_COMPARED, _OPEN = "deadline", "deadline/open"
# of a trace there may be any number
_MOST_CLASSES = 8


def prepare_cells(experiment: CellExperiment, folder: Path) -> ExperimentTask:
    """Return an experiment's simulations.

    Raises:
        ConfigError: a profile or the trace can't be used.
        ValueError: a profile has no steps, or the batching gain leaves nothing of them.
    """
    setting = Setting.of(experiment, folder)
    parts = [partial(run_cell, experiment, run, folder) for run in experiment.runs()]
    return ExperimentTask(experiment.name, parts, partial(report_cells, setting))


def report_cells(setting: Setting, found: Sequence[CellRow]) -> Report:
    """Sum up the rows of all simulations of an experiment."""
    experiment, rows = setting.experiment, Rows(found)
    loads = {f"{load:g}": load for load in experiment.loads}
    first, *others = experiment.policies

    def attained(policy: str, load: float) -> str:
        return rows.mean("attainment", policy, [load]).as_points()

    def gained(policy: str, load: float) -> str:
        return rows.gain("attainment", first, policy, [load]).as_points()

    corner, classes = experiment.load_words, _shown_classes(setting)
    tables = [grid("Done in time, % (simulated)", corner, loads, experiment.policies, attained)]
    if others:
        title = f"Points that {first} gains over others, paired by seed (simulated)"
        tables.append(grid(title, corner, loads, others, gained))
    by_class = [
        [policy, name, *(_class_mean(rows, policy, load, one).as_points() for one in classes)]
        for policy in experiment.policies[:2]
        for name, load in loads.items()
    ]
    tables.append(Table("By class, % (simulated)", ["policy", corner, *classes], by_class))
    refusing = (one for one in experiment.policies if one in _REFUSING or one.startswith(_SERVICES))
    tables += [_refusals(experiment, rows, one) for one in refusing]
    shares = _add_on_shares(setting)
    tables += [shares] if shares else []
    views = {row.load: row.view for row in found if row.view is not None}
    figures = {
        "experiment": experiment.model_dump(mode="json"),
        "profile_kinds": list(setting.kinds),
        "cells": _figures(experiment, rows),
        "false_refusals": _false_figures(experiment, rows),
    }
    what = _what(setting, has_add_ons=shares is not None)
    plots = _plots(experiment, rows, classes, views)
    # which replica stepped which sizes when, at the middle load
    load = sorted(experiment.loads)[len(loads) // 2]
    title = (
        f"{experiment.name}: {first}, {experiment.load_name(load)}, seed {experiment.seeds[0]} "
        "(simulated); a bar is as high as its batch is full"
    )
    timeline = Timeline(title, views[load].replicas, views[load].sizes, views[load].bars)
    return Report(experiment.name, what, tables, plots, timeline, figures)


def _what(setting: Setting, *, has_add_ons: bool) -> str:
    experiment, seeds = setting.experiment, setting.experiment.seeds
    pools = []
    for asked, error in ((one.asked, one.fitted.error) for one in setting.pools):
        slower = "" if asked.times == 1 else f" times {asked.times:g}"
        pools.append(
            f"{asked.replicas} as {asked.profile}{slower} (linear in a batch's pixels: off by "
            f"{error.mean:.1%} on average and {error.worst:.1%} at most)"
        )
    failures = add_ons = ""
    if experiment.mtbf_s is not None:
        failures = f" that fail every {experiment.mtbf_s:g} s on average"
    if has_add_ons:
        add_ons = " Add-ons cost what is published of SDXL, carried over to batches by a model."
    runs = f"seeds {seeds[0]} to {seeds[-1]}, means with 95 % intervals"
    if not experiment.is_drawn:
        runs = "one run, as nothing is drawn"
    return (
        f"{experiment.what} Simulated, {', '.join(setting.kinds)} times; replicas{failures}: "
        f"{'; '.join(pools)}. {setting.source.words}; {runs}.{add_ons}"
    )


def _figures(experiment: CellExperiment, rows: Rows) -> list[dict[str, Any]]:
    key = "rate_per_s" if experiment.trace is None else "speed"
    return [
        {
            "policy": policy,
            key: load,
            **{
                name: rows.mean(name, policy, [load]).as_figures()
                for name in ("attainment", "refused", "broken")
            },
            "by_class": {
                name: mean.as_figures()
                for name, mean in sorted(rows.class_means(policy, load, if_absent=1.0).items())
            },
            "samples": [round(one, 5) for one in rows.samples("attainment", policy, [load])],
        }
        for policy in experiment.policies
        for load in experiment.loads
    ]


def _class_mean(rows: Rows, policy: str, load: float, name: str) -> Mean:
    """What a class attains; a seed in which none of it came counts as all in time."""
    means = rows.class_means(policy, load, if_absent=1.0)
    return means.get(name) or mean_of([1.0] * len(rows.of(policy, load)))


def _shown_classes(setting: Setting) -> list[str]:
    """Those that most requests are of, in their own order."""
    counts = Counter(one.slo_class for one in setting.first_workload)
    names = sorted(setting.source.classes, key=lambda name: -counts[name])[:_MOST_CLASSES]
    return [name for name in setting.source.classes if name in names]


def _refusals(experiment: CellExperiment, rows: Rows, policy: str) -> Table:
    """What refusals cost those who would have been in time without any."""
    head = [experiment.load_words, "refused", "admitted and late"]
    is_compared = policy == _COMPARED and _OPEN in experiment.policies
    if is_compared:
        head += ["refused, in time if all were admitted", "the same, % of the refused"]
    body = []
    for load in experiment.loads:
        cells = [rows.mean(name, policy, [load]).as_points() for name in ("refused", "broken")]
        if is_compared:
            of_all, of_refused = _false_refusals(rows, load)
            cells += [of_all.as_points(), of_refused.as_points() if of_refused else ""]
        body.append([f"{load:g}", *cells])
    return Table(f"Refusals of {policy}, % of arrivals (simulated)", head, body)


def _false_figures(experiment: CellExperiment, rows: Rows) -> list[dict[str, Any]]:
    if not {_COMPARED, _OPEN} <= set(experiment.policies):
        return []
    found = [(load, *_false_refusals(rows, load)) for load in experiment.loads]
    return [
        {
            "load": load,
            "of_arrivals": of_all.as_figures(),
            "of_refused": of_refused.as_figures() if of_refused else None,
        }
        for load, of_all, of_refused in found
    ]


def _false_refusals(rows: Rows, load: float) -> tuple[Mean, Mean | None]:
    """Requests refused that are in time without refusals: of the arrivals, and of the refused."""
    of_all, of_refused = [], []
    for mine, other in zip(rows.of(_COMPARED, load), rows.of(_OPEN, load), strict=True):
        pairs = zip(mine.admitted, other.met, strict=True)
        num_false = sum(admitted == "0" and met == "1" for admitted, met in pairs)
        of_all.append(num_false / max(1, len(mine.met)))
        # a seed without refusals has no such share
        if "0" in mine.admitted:
            of_refused.append(num_false / mine.admitted.count("0"))
    return mean_of(of_all), mean_of(of_refused) if of_refused else None


def _add_on_shares(setting: Setting) -> Table | None:
    """How many requests have how many ControlNets and LoRAs; None if there are none."""
    experiment, workload = setting.experiment, setting.first_workload
    sorts = {
        "ControlNets": Counter(len(one.controlnets) for one in workload),
        "LoRAs": Counter(len(one.loras) for one in workload),
    }
    most = max((num for counts in sorts.values() for num in counts), default=0)
    if not most:
        return None
    load = experiment.load_name(experiment.loads[0])
    title = f"Requests by number of add-ons, %, {load}, seed {experiment.seeds[0]}"

    def share(num: str, counts: Counter[int]) -> str:
        return f"{100 * counts[int(num)] / len(workload):.1f}"

    return grid(title, "of", sorts, [f"{num}" for num in range(most + 1)], share)


def _plots(
    experiment: CellExperiment, rows: Rows, classes: Sequence[str], views: Mapping[float, CellView]
) -> list[Plot]:
    """What policies and classes attain over the loads, and the queue over time."""
    loads, first = sorted(experiment.loads), experiment.policies[0]
    x_label = "requests per second" if experiment.trace is None else "speed of the replay"
    if experiment.night is not None:
        x_label += " at the peak"
    attained = {
        policy: percent_line(loads, [rows.mean("attainment", policy, [load]) for load in loads])
        for policy in experiment.policies
    }
    by_class = {
        name: percent_line(loads, [_class_mean(rows, first, load, name) for load in loads])
        for name in classes
    }
    waiting = {
        experiment.load_name(load): Line(views[load].times_s, views[load].waiting) for load in loads
    }
    name, y_label = experiment.name, "done in time, %"
    seed = f"seed {experiment.seeds[0]} (simulated)"
    return [
        Plot("attainment", f"{name} (simulated)", x_label, {y_label: attained}),
        Plot("classes", f"{name}: {first}, by class (simulated)", x_label, {y_label: by_class}),
        Plot("waiting", f"{name}: {first}, {seed}", "seconds", {"requests waiting": waiting}),
    ]
