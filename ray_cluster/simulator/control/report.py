"""Prepares and reports experiments with a control loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.policies.planning.fleet import Fleet
from ray_cluster.simulator.control.course import Course
from ray_cluster.simulator.control.experiment import (
    Column,
    ControlExperiment,
    ControlRow,
    TunedSettings,
    run_policy,
)
from ray_cluster.simulator.experiment import ExperimentTask
from ray_cluster.simulator.reports import Bar, Line, Plot, Report, Table, Timeline
from ray_cluster.simulator.results import Mean, Rows

BROKEN = "broken"


def prepare_control(experiment: ControlExperiment, folder: Path) -> ExperimentTask:
    """Return the simulations of a file in the folder; errors as of ``ControlExperiment.tuned``."""
    experiment = experiment.located(folder)
    tuned = experiment.tuned()
    return ExperimentTask(
        experiment.name,
        control_parts(experiment, tuned),
        partial(report_control, experiment, tuned),
    )


def control_parts(
    experiment: ControlExperiment, tuned: Sequence[TunedSettings]
) -> list[Callable[[], ControlRow]]:
    """Return every simulation of an experiment; those of one seed have equal requests."""
    return [partial(_run_part, experiment, one, seed) for seed in experiment.seeds for one in tuned]


def _run_part(experiment: ControlExperiment, tuned: TunedSettings, seed: int) -> ControlRow:
    row = run_policy(experiment, tuned.policy, tuned.settings, seed)
    return row if experiment.shows(tuned.policy, seed) else replace(row, course=None)


def report_control(
    experiment: ControlExperiment, tuned: Sequence[TunedSettings], found: Sequence[ControlRow]
) -> Report:
    """Sum up the rows of all simulations of an experiment."""
    rows, name = Rows(found), experiment.name
    courses = {row.policy: row.course for row in found if row.course is not None}
    first = experiment.policies[0]
    timeline = gpu_timeline(
        courses[first],
        experiment.fleet(),
        experiment.gpus_by_type,
        title=f"{first}: {experiment.BARS} (simulated); seed {experiment.first_seed}",
    )
    over_time = Plot(
        "over-time",
        f"{name}: seed {experiment.first_seed} over time (simulated)",
        "seconds",
        experiment.panels(courses),
    )
    return Report(
        name,
        f"{_preface(experiment, rows)} {experiment.words}",
        _tables(experiment, rows, tuned),
        [_trade_off(experiment, rows), over_time],
        timeline,
        _figures(experiment, rows, tuned),
    )


def _preface(experiment: ControlExperiment, rows: Rows) -> str:
    """What was simulated, from which figures."""
    by_kinds: dict[str, list[str]] = {}
    for profile in experiment.profiles:
        by_kinds.setdefault(", ".join(profile.kinds), []).append(profile.name)
    times = " and ".join(f"{kinds} times ({', '.join(one)})" for kinds, one in by_kinds.items())
    num_requests = rows.mean("num_requests", experiment.policies[0]).value
    return (
        f"{experiment.what} Simulated, {times}; some {num_requests:,.0f} requests a run, seeds "
        f"{experiment.seeds[0]} to {experiment.seeds[-1]}, means with 95 % intervals."
    )


def _tables(
    experiment: ControlExperiment, rows: Rows, tuned: Sequence[TunedSettings]
) -> list[Table]:
    """The means of all policies, the first's minus the others', and settings."""
    first, *others = experiment.policies

    def table(title: str, policies: Sequence[str], mean: Callable[[str, str], Mean]) -> Table:
        body = [
            [one, *(_cell(column, mean(column.key, one)) for column in columns)] for one in policies
        ]
        return Table(title, ["policy", *(column.title for column in columns)], body)

    columns = experiment.columns
    tables = [table("Means (simulated)", experiment.policies, rows.mean)]
    if others:
        title = f"{first} minus others, paired by seed (simulated)"
        tables.append(table(title, others, lambda key, other: rows.gain(key, first, other)))
    settings = [
        [
            one.policy,
            ", ".join(f"{name} {value:g}" for name, value in one.settings.items()),
            one.chosen_by,
        ]
        for one in tuned
    ]
    return [*tables, Table("Settings", ["policy", "settings", "chosen by"], settings)]


def _cell(column: Column, mean: Mean) -> str:
    return mean.times(column.factor).as_text(column.digits)


def _trade_off(experiment: ControlExperiment, rows: Rows) -> Plot:
    """A point for each policy, with the intervals of both figures."""
    x, y = experiment.axes
    lines = {}
    for policy in experiment.policies:
        at, high = (rows.mean(one.key, policy).times(one.factor) for one in (x, y))
        lines[policy] = Line([at.value], [high.value], [high.half_width], [at.half_width])
    name, title = experiment.TRADE_OFF
    # shares of late requests go over decades
    is_wide = x.key == "violations"
    return Plot(name, f"{experiment.name}: {title} (simulated)", x.title, {y.title: lines}, is_wide)


def _figures(
    experiment: ControlExperiment, rows: Rows, tuned: Sequence[TunedSettings]
) -> dict[str, Any]:
    """Everything for the JSON file: a sample for every seed, in their order."""
    keys = [one.key for one in experiment.columns]
    first = experiment.policies[0]

    def sampled(policy: str, key: str) -> dict[str, Any]:
        samples = [round(one, 6) for one in rows.samples(key, policy)]
        return {**rows.mean(key, policy).as_figures(), "samples": samples}

    return {
        "experiment": experiment.model_dump(mode="json"),
        "profile_kinds": sorted({kind for one in experiment.profiles for kind in one.kinds}),
        "seeds": list(experiment.seeds),
        "policies": [
            {
                "policy": one.policy,
                "settings": dict(one.settings),
                "chosen_by": one.chosen_by,
                **{key: sampled(one.policy, key) for key in (*keys, "num_requests")},
            }
            for one in tuned
        ],
        "first_minus_others": [
            {"policy": other, **{key: rows.gain(key, first, other).as_figures() for key in keys}}
            for other in experiment.policies[1:]
        ],
    }


def gpu_timeline(
    course: Course, fleet: Fleet, num_gpus: Mapping[str, int], *, title: str
) -> Timeline:
    """Return how many GPUs each pool has over time.

    The loop sees numbers, not which GPU is whose: a row is the first, second, ... GPU of its type,
    counted from the pool that the fleet names first; broken ones come last.
    """
    uses = [list(_uses(state, fleet, num_gpus)) for state in course.states]
    ends_s = [state.now_s for state in course.states]
    # the last round lasts as long as the one before it
    ends_s.append(2 * ends_s[-1] - ends_s[-2] if len(ends_s) > 1 else ends_s[-1])
    spans = list(pairwise(ends_s))
    rows = [
        f"{device.device} {number + 1}"
        for device in fleet.devices
        for number in range(num_gpus[device.device])
    ]
    bars = [
        bar for row in range(len(rows)) for bar in _bars(row, [one[row] for one in uses], spans)
    ]
    labels = [label for pool in fleet.pools for label in (pool.name, f"{pool.name} loads")]
    shown = {bar.label for bar in bars}
    return Timeline(title, rows, [one for one in (*labels, BROKEN) if one in shown], bars)


def _uses(state: ClusterState, fleet: Fleet, num_gpus: Mapping[str, int]) -> Iterator[str | None]:
    """What every GPU does, type after type; None if it is free or about to be."""
    for device in fleet.devices:
        num = num_gpus[device.device]
        used: list[str] = []
        for pool in fleet.pools:
            if pool.device == device.device:
                seen = state.pool(pool.name)
                used += [pool.name] * (seen.num_ready * pool.gpus_per_replica)
                used += [f"{pool.name} loads"] * (seen.num_loading * pool.gpus_per_replica)
        num_working = state.num_gpus(device.device)
        free = [None] * (num_working - len(used))
        yield from [*used, *free, *[BROKEN] * (num - num_working)]


def _bars(row: int, uses: list[str | None], spans: list[tuple[float, float]]) -> Iterator[Bar]:
    """Of one GPU; as long as it does the same it is one bar."""
    for label, group in groupby(zip(uses, spans, strict=True), key=lambda one: one[0]):
        held = [span for _, span in group]
        if label is not None:
            yield Bar(row, held[0][0], held[-1][1], label)
