"""What reports of experiments with a control loop have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ray_cluster.policies.latency import LatencyProfile
from ray_cluster.simulator.comparison import Comparison, R
from ray_cluster.simulator.control_choices import Choice
from ray_cluster.simulator.control_experiment import ControlExperiment
from ray_cluster.simulator.reports import Line, Plot, Table


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


def preface(
    experiment: ControlExperiment, profiles: Sequence[LatencyProfile], num_requests: float
) -> str:
    """Return what was simulated, from which figures."""
    by_kinds: dict[str, list[str]] = {}
    for profile in profiles:
        by_kinds.setdefault(", ".join(profile.kinds), []).append(profile.name)
    times = " and ".join(f"{kinds} times ({', '.join(one)})" for kinds, one in by_kinds.items())
    return (
        f"{experiment.what} Simulated, {times}; some {num_requests:,.0f} requests a run, seeds "
        f"{experiment.seeds[0]} to {experiment.seeds[-1]}, means with 95 % intervals."
    )


def tables_of(
    found: Comparison[R], figures: Sequence[Figure], choices: Sequence[Choice]
) -> list[Table]:
    """Return the means of all policies, the first's less the others', and settings."""
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


def trade_off(
    found: Comparison[R], x: Figure, y: Figure, *, name: str, title: str, is_wide: bool
) -> Plot:
    """Return a point for each policy, with the intervals of both figures.

    Args:
        found: rows.
        x: figure of the one axis.
        y: figure of the other.
        name: of the plot's file.
        title: of the plot.
        is_wide: whether x goes over decades.
    """
    across, up = found.estimates(x.key), found.estimates(y.key)
    lines = {}
    for policy in found.policies:
        at, high = across[policy].times(x.factor), up[policy].times(y.factor)
        lines[policy] = Line([at.value], [high.value], [high.half_width], [at.half_width])
    return Plot(name, title, x.title, y.title, lines, "symlog" if is_wide else "linear")


def figures_of(
    experiment: ControlExperiment,
    profiles: Sequence[LatencyProfile],
    found: Comparison[R],
    figures: Sequence[Figure],
    choices: Sequence[Choice],
) -> dict[str, Any]:
    """Return everything for machines: a sample for every seed, in their order."""
    keys = [*(one.key for one in figures), "num_requests"]
    differences = {key: found.differences(key) for key in keys}
    return {
        "experiment": experiment.model_dump(mode="json"),
        "profile_kinds": sorted({kind for one in profiles for kind in one.kinds}),
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
