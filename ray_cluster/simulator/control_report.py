"""Sums up experiments with a control loop: tables, plots and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

from ray_cluster.simulator.comparison import Comparison, R
from ray_cluster.simulator.control_choices import TunedSettings
from ray_cluster.simulator.control_course import ControlResult, Course
from ray_cluster.simulator.control_experiment import ControlExperiment, E
from ray_cluster.simulator.control_timeline import gpu_timeline
from ray_cluster.simulator.reports import Line, Plot, Report, Stack, Table


class Figure(NamedTuple):
    """A figure of every run.

    Attributes:
        key: of the rows, and in JSON.
        title: for people.
        factor: from the rows' unit to the title's.
        digits: behind the point.
    """

    key: str
    title: str
    factor: float = 1.0
    digits: int = 1


@dataclass(frozen=True, slots=True)
class Form(Generic[E]):
    """What the report of one kind of experiment says beside what all do.

    Attributes:
        words: what its figures mean.
        figures: of every run.
        x: figure of the horizontal axis of the plot of all policies.
        y: figure of the other axis.
        plot: name of the plot's file.
        title: of the plot.
        is_wide: whether x goes over decades.
        bars: what the timeline's bars stand for.
        over_time: draws the courses of some policies.
    """

    words: str
    figures: Sequence[Figure]
    x: Figure
    y: Figure
    plot: str
    title: str
    is_wide: bool
    bars: str
    over_time: Callable[[E, Mapping[str, Course]], Stack]


def report_control(
    experiment: E, choices: Sequence[TunedSettings], runs: Sequence[ControlResult[R]], form: Form[E]
) -> Report:
    """Sum up all simulations of an experiment."""
    found = Comparison(tuple(run.row for run in runs))
    courses = {run.row.policy: run.course for run in runs if run.course is not None}
    first = experiment.policies[0]
    timeline = gpu_timeline(
        courses[first],
        experiment.fleet(),
        experiment.gpus_by_type,
        title=f"{first}: {form.bars} (simulated); seed {experiment.first_seed}",
    )
    return Report(
        experiment.name,
        f"{_preface(experiment, found)} {form.words}",
        _tables(found, form.figures, choices),
        [_trade_off(experiment, found, form)],
        [timeline],
        _figures(experiment, found, form.figures, choices),
        [form.over_time(experiment, courses)],
    )


def _preface(experiment: ControlExperiment, found: Comparison[R]) -> str:
    """What was simulated, from which figures."""
    by_kinds: dict[str, list[str]] = {}
    for profile in experiment.profiles:
        by_kinds.setdefault(", ".join(profile.kinds), []).append(profile.name)
    times = " and ".join(f"{kinds} times ({', '.join(one)})" for kinds, one in by_kinds.items())
    num_requests = found.estimates("num_requests")[experiment.policies[0]].value
    return (
        f"{experiment.what} Simulated, {times}; some {num_requests:,.0f} requests a run, seeds "
        f"{experiment.seeds[0]} to {experiment.seeds[-1]}, means with 95 % intervals."
    )


def _tables(
    found: Comparison[R], figures: Sequence[Figure], choices: Sequence[TunedSettings]
) -> list[Table]:
    """The means of all policies, the first's less the others', and settings."""
    columns = [one.title for one in figures]
    first, *others = found.policies
    tables = [
        Table(
            "Means (simulated)", ["policy", *columns], _body(found.policies, _means(found, figures))
        )
    ]
    if others:
        title = f"{first} minus others, paired by seed (simulated)"
        tables.append(
            Table(title, ["policy", *columns], _body(others, _differences(found, figures)))
        )
    settings = [
        [
            one.policy,
            ", ".join(f"{knob} {value:g}" for knob, value in one.settings.items()),
            one.chosen_by,
        ]
        for one in choices
    ]
    return [*tables, Table("Settings", ["policy", "settings", "chosen by"], settings)]


def _means(found: Comparison[R], figures: Sequence[Figure]) -> list[Mapping[str, str]]:
    """Cells of a table by policy, a column each."""
    return [
        {
            policy: mean.times(one.factor).as_text(one.digits)
            for policy, mean in found.estimates(one.key).items()
        }
        for one in figures
    ]


def _differences(found: Comparison[R], figures: Sequence[Figure]) -> list[Mapping[str, str]]:
    return [
        {
            policy: mean.times(one.factor).as_text(one.digits)
            for policy, mean in found.differences(one.key).items()
        }
        for one in figures
    ]


def _body(policies: Sequence[str], columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    return [[policy, *(one[policy] for one in columns)] for policy in policies]


def _trade_off(experiment: ControlExperiment, found: Comparison[R], form: Form[E]) -> Plot:
    """A point for each policy, with the intervals of both figures."""
    x, y = form.x, form.y
    across, up = found.estimates(x.key), found.estimates(y.key)
    lines = {}
    for policy in found.policies:
        at, high = across[policy].times(x.factor), up[policy].times(y.factor)
        lines[policy] = Line([at.value], [high.value], [high.half_width], [at.half_width])
    return Plot(
        form.plot,
        f"{experiment.name}: {form.title} (simulated)",
        x.title,
        y.title,
        lines,
        "symlog" if form.is_wide else "linear",
    )


def _figures(
    experiment: ControlExperiment,
    found: Comparison[R],
    figures: Sequence[Figure],
    choices: Sequence[TunedSettings],
) -> dict[str, Any]:
    """Everything for machines: a sample for every seed, in their order."""
    keys = [*(one.key for one in figures), "num_requests"]
    differences = {key: found.differences(key) for key in keys}
    return {
        "experiment": experiment.model_dump(mode="json"),
        "profile_kinds": sorted({kind for one in experiment.profiles for kind in one.kinds}),
        "seeds": list(experiment.seeds),
        "policies": [
            {
                "policy": choice.policy,
                "settings": dict(choice.settings),
                "chosen_by": choice.chosen_by,
                **{key: _sampled(found, choice.policy, key) for key in keys},
            }
            for choice in choices
        ],
        "first_minus_others": [
            {
                "policy": policy,
                **{one.key: differences[one.key][policy].as_figures() for one in figures},
            }
            for policy in found.policies[1:]
        ],
    }


def _sampled(found: Comparison[R], policy: str, key: str) -> dict[str, Any]:
    by_seed = found.by_seed(policy, key)
    samples = [round(by_seed[seed], 6) for seed in sorted(by_seed)]
    return {**found.estimates(key)[policy].as_figures(), "samples": samples}
