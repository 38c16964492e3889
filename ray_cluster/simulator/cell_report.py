"""Tables of experiments on replicas of one device each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from ray_cluster.simulator.cell_excerpt import CellExcerpt, timeline_of, waiting_plot
from ray_cluster.simulator.cell_experiment import CellExperiment
from ray_cluster.simulator.cell_plots import Rows, attainment_plot, class_mean, classes_plot
from ray_cluster.simulator.cell_pools import PricedPool
from ray_cluster.simulator.cell_runs import CellRow, Setting
from ray_cluster.simulator.intervals import Mean, mean_of, paired_difference
from ray_cluster.simulator.reports import Report, Table

# policies that refuse; of them, the one that is there without refusals, too
_REFUSING = ("deadline", "deadline/one-size")
_COMPARED, _OPEN = "deadline", "deadline/open"
# of a trace there may be any number
_MOST_CLASSES = 8


def report_cells(
    setting: Setting, found: Sequence[CellRow], excerpts: Sequence[CellExcerpt]
) -> Report:
    """Sum up all simulations of an experiment.

    Args:
        setting: the experiment's.
        found: a row of each of its runs.
        excerpts: what is shown of one run of each load.
    """
    experiment = setting.experiment
    rows: defaultdict[tuple[str, float], list[CellRow]] = defaultdict(list)
    for row in sorted(found, key=lambda one: one.run.seed):
        rows[row.run.policy, row.run.load].append(row)
    classes = _shown_classes(setting)
    tables = [_attainment(experiment, rows)]
    if len(experiment.policies) > 1:
        tables.append(_differences(experiment, rows))
    tables.append(_classes(experiment, rows, classes))
    refusing = [one for one in experiment.policies if one in _REFUSING]
    tables += [_refusals(experiment, rows, one) for one in refusing]
    shares = _add_on_shares(setting)
    tables += [shares] if shares else []
    plots = [attainment_plot(experiment, rows), classes_plot(experiment, rows, classes)]
    plots.append(waiting_plot(experiment, excerpts))
    timeline = timeline_of(experiment, excerpts)
    figures = {
        "experiment": experiment.model_dump(mode="json"),
        "profile_kinds": list(setting.kinds),
        "cells": _figures(experiment, rows),
        "false_refusals": _false_figures(experiment, rows),
    }
    what = _what(setting, has_add_ons=shares is not None)
    return Report(experiment.name, what, tables, plots, [timeline], figures)


def _what(setting: Setting, *, has_add_ons: bool) -> str:
    experiment, seeds = setting.experiment, setting.experiment.seeds
    pools = "; ".join(_pool_words(pool) for pool in setting.pools)
    failures = ""
    if experiment.mtbf_s is not None:
        failures = f" that fail every {experiment.mtbf_s:g} s on average"
    add_ons = ""
    if has_add_ons:
        add_ons = " Add-ons cost what is published of SDXL, carried over to batches by a model."
    runs = f"seeds {seeds[0]} to {seeds[-1]}, means with 95 % intervals"
    if not experiment.is_drawn:
        runs = "one run, as nothing is drawn"
    return (
        f"{experiment.what} Simulated, {', '.join(setting.kinds)} times; replicas{failures}: "
        f"{pools}. {setting.source.words}; {runs}.{add_ons}"
    )


def _pool_words(pool: PricedPool) -> str:
    error, times = pool.fitted.error, pool.asked.times
    slower = "" if times == 1 else f" times {times:g}"
    return (
        f"{pool.asked.replicas} as {pool.asked.profile}{slower} (linear in a batch's pixels: off "
        f"by {error.mean:.1%} on average and {error.worst:.1%} at most)"
    )


def _figures(experiment: CellExperiment, rows: Rows) -> list[dict[str, Any]]:
    key = "rate_per_s" if experiment.trace is None else "speed"
    return [
        {
            "policy": policy,
            key: load,
            "attainment": _mean(rows[policy, load]).as_figures(),
            "by_class": {
                name: class_mean(rows[policy, load], name).as_figures()
                for name in sorted(
                    {one for row in rows[policy, load] for one in row.attainment_by_class}
                )
            },
            "refused": mean_of([one.refused for one in rows[policy, load]]).as_figures(),
            "broken": mean_of([one.broken for one in rows[policy, load]]).as_figures(),
            "samples": [round(one.attainment, 5) for one in rows[policy, load]],
        }
        for policy in experiment.policies
        for load in experiment.loads
    ]


def _false_figures(experiment: CellExperiment, rows: Rows) -> list[dict[str, Any]]:
    if not {_COMPARED, _OPEN} <= set(experiment.policies):
        return []
    found = [
        (load, *_false_refusals(rows[_COMPARED, load], rows[_OPEN, load]))
        for load in experiment.loads
    ]
    return [
        {
            "load": load,
            "of_arrivals": of_all.as_figures(),
            "of_refused": of_refused.as_figures() if of_refused else None,
        }
        for load, of_all, of_refused in found
    ]


def _mean(rows: Sequence[CellRow]) -> Mean:
    return mean_of([one.attainment for one in rows])


def _shown_classes(setting: Setting) -> list[str]:
    """Those that most requests are of, in their own order."""
    experiment = setting.experiment
    workload = setting.workload(experiment.loads[0], experiment.seeds[0])
    counts = Counter(one.slo_class for one in workload)
    names = sorted(setting.source.classes, key=lambda name: -counts[name])[:_MOST_CLASSES]
    return [name for name in setting.source.classes if name in names]


def _attainment(experiment: CellExperiment, rows: Rows) -> Table:
    body = [
        [f"{load:g}", *(_mean(rows[policy, load]).as_points() for policy in experiment.policies)]
        for load in experiment.loads
    ]
    head = [experiment.load_words, *experiment.policies]
    return Table("Done in time, % (simulated)", head, body)


def _differences(experiment: CellExperiment, rows: Rows) -> Table:
    first, *others = experiment.policies
    body = [
        [f"{load:g}", *(_gain(rows[first, load], rows[policy, load]) for policy in others)]
        for load in experiment.loads
    ]
    title = f"Points that {first} gains over others, paired by seed (simulated)"
    return Table(title, [experiment.load_words, *others], body)


def _gain(mine: Sequence[CellRow], theirs: Sequence[CellRow]) -> str:
    return paired_difference(
        [one.attainment for one in mine], [one.attainment for one in theirs]
    ).as_points()


def _classes(experiment: CellExperiment, rows: Rows, classes: Sequence[str]) -> Table:
    body = [
        [
            policy,
            f"{load:g}",
            *(class_mean(rows[policy, load], name).as_points() for name in classes),
        ]
        for policy in experiment.policies[:2]
        for load in experiment.loads
    ]
    head = ["policy", experiment.load_words, *classes]
    return Table("By class, % (simulated)", head, body)


def _refusals(experiment: CellExperiment, rows: Rows, policy: str) -> Table:
    """What refusals cost those who would have been in time without any."""
    head = [experiment.load_words, "refused", "let in and late"]
    is_compared = policy == _COMPARED and _OPEN in experiment.policies
    if is_compared:
        head += ["refused, in time if all were let in", "the same, % of the refused"]
    body = []
    for load in experiment.loads:
        mine = rows[policy, load]
        cells = [
            mean_of([one.refused for one in mine]).as_points(),
            mean_of([one.broken for one in mine]).as_points(),
        ]
        if is_compared:
            of_all, of_refused = _false_refusals(mine, rows[_OPEN, load])
            cells += [of_all.as_points(), of_refused.as_points() if of_refused else ""]
        body.append([f"{load:g}", *cells])
    return Table(f"Refusals of {policy}, % of arrivals (simulated)", head, body)


def _false_refusals(mine: Sequence[CellRow], others: Sequence[CellRow]) -> tuple[Mean, Mean | None]:
    """Who was refused and is in time where nobody is: of the arrivals, and of the refused."""
    false = [(_num_false(a, b), a) for a, b in zip(mine, others, strict=True)]
    of_all = [num / max(1, one.num_arrivals) for num, one in false]
    # a seed that refused nobody says nothing of refusals
    of_refused = [num / one.let_in.count("0") for num, one in false if "0" in one.let_in]
    return mean_of(of_all), mean_of(of_refused) if of_refused else None


def _num_false(refusing: CellRow, open_row: CellRow) -> int:
    """How many were refused that are in time where nobody is."""
    pairs = zip(refusing.let_in, open_row.met, strict=True)
    return sum(let_in == "0" and met == "1" for let_in, met in pairs)


def _add_on_shares(setting: Setting) -> Table | None:
    """How many requests have how many ControlNets and LoRAs; None if nobody has any."""
    experiment = setting.experiment
    workload = setting.workload(experiment.loads[0], experiment.seeds[0])
    sorts = {
        "ControlNets": Counter(len(one.controlnets) for one in workload),
        "LoRAs": Counter(len(one.loras) for one in workload),
    }
    most = max((num for counts in sorts.values() for num in counts), default=0)
    if not most:
        return None
    body = [
        [name, *(f"{100 * counts[num] / len(workload):.1f}" for num in range(most + 1))]
        for name, counts in sorts.items()
    ]
    title = f"Requests with so many add-ons, %, {experiment.load_name(experiment.loads[0])}, "
    title += f"seed {experiment.seeds[0]}"
    return Table(title, ["of", *(f"{num}" for num in range(most + 1))], body)
