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
    Setting,
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
    parts = control_parts(experiment, tuned)
    return ExperimentTask(experiment.name, parts, partial(report_control, experiment, tuned))


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
    rows, name, setting = Rows(found), experiment.name, experiment.setting()
    courses = {row.policy: row.course for row in found if row.course is not None}
    first, seeds = experiment.policies[0], experiment.seeds
    title = f"{first}: {experiment.BARS} (simulated); seed {seeds[0]}"
    by_kinds: dict[str, list[str]] = {}
    for profile in setting.profiles:
        by_kinds.setdefault(", ".join(profile.kinds), []).append(profile.name)
    times = " and ".join(f"{kinds} times ({', '.join(one)})" for kinds, one in by_kinds.items())
    what = (
        f"{experiment.what} Simulated, {times}; some {rows.mean('num_requests', first).value:,.0f} "
        f"requests a run, seeds {seeds[0]} to {seeds[-1]}, means with 95 % intervals. "
        f"{setting.words}"
    )
    over_time = f"{name}: seed {seeds[0]} over time (simulated)"
    return Report(
        name,
        what,
        _tables(experiment, setting.columns, rows, tuned),
        [
            _trade_off(experiment, setting.axes, rows),
            Plot("over-time", over_time, "seconds", experiment.panels(courses)),
        ],
        gpu_timeline(courses[first], setting.fleet, setting.num_gpus, title=title),
        _figures(experiment, setting, rows, tuned),
    )


def _tables(
    experiment: ControlExperiment,
    columns: Sequence[Column],
    rows: Rows,
    tuned: Sequence[TunedSettings],
) -> list[Table]:
    """The means of all policies, the first's minus the others', and settings."""
    first, *others = experiment.policies

    def table(title: str, policies: Sequence[str], mean: Callable[[str, str], Mean]) -> Table:
        body = [
            [one, *(mean(key, one).times(k).as_text(n) for key, _, k, n in columns)]
            for one in policies
        ]
        return Table(title, ["policy", *(column.title for column in columns)], body)

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


def _trade_off(experiment: ControlExperiment, axes: tuple[Column, Column], rows: Rows) -> Plot:
    """A point for each policy, with the intervals of both figures."""
    x, y = axes
    lines = {}
    for policy in experiment.policies:
        at, high = (rows.mean(one.key, policy).times(one.factor) for one in axes)
        lines[policy] = Line([at.value], [high.value], [high.half_width], [at.half_width])
    name, title = experiment.TRADE_OFF
    # shares of late requests go over decades
    is_wide = x.key == "violations"
    return Plot(name, f"{experiment.name}: {title} (simulated)", x.title, {y.title: lines}, is_wide)


def _figures(
    experiment: ControlExperiment, setting: Setting, rows: Rows, tuned: Sequence[TunedSettings]
) -> dict[str, Any]:
    """Everything for the JSON file: a sample for every seed, in their order."""
    keys = [one.key for one in setting.columns]
    first, *others = experiment.policies

    def sampled(policy: str, key: str) -> dict[str, Any]:
        samples = [round(one, 6) for one in rows.samples(key, policy)]
        return {**rows.mean(key, policy).as_figures(), "samples": samples}

    return {
        "experiment": experiment.model_dump(mode="json"),
        "profile_kinds": sorted({kind for one in setting.profiles for kind in one.kinds}),
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
            for other in others
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
    bars = []
    for row in range(len(rows)):
        pairs = zip([one[row] for one in uses], spans, strict=True)
        # as long as a GPU does the same it is one bar
        for label, group in groupby(pairs, key=lambda one: one[0]):
            held = [span for _, span in group]
            if label is not None:
                bars.append(Bar(row, held[0][0], held[-1][1], label))
    labels = [label for pool in fleet.pools for label in (pool.name, f"{pool.name} loads")]
    shown = {bar.label for bar in bars}
    return Timeline(title, rows, [one for one in (*labels, BROKEN) if one in shown], bars)


def _uses(state: ClusterState, fleet: Fleet, num_gpus: Mapping[str, int]) -> Iterator[str | None]:
    """What every GPU does, type after type; None if it is free or about to be."""
    for device, num in num_gpus.items():
        used: list[str | None] = []
        for pool in fleet.pools:
            if pool.device == device:
                seen = state.pool(pool.name)
                used += [pool.name] * (seen.num_ready * pool.gpus_per_replica)
                used += [f"{pool.name} loads"] * (seen.num_loading * pool.gpus_per_replica)
        num_working = state.num_gpus(device)
        free = [None] * (num_working - len(used))
        yield from [*used, *free, *[BROKEN] * (num - num_working)]
