"""What is aimed at with each policy, beside what the simulations found.

Each aim is judged by one experiment; the same figure of other experiments stands beside it, the
worst first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.verdicts import Aim, at_least, at_most, may_be_at_least, may_be_at_most
from ray_cluster.simulator.results import Mean, mean_of, paired_difference

Figures = Mapping[str, Any]
# by the experiments' names
Results = Mapping[str, Figures]

_MIXED = "mixed-sizes"
_UNLIKE_MIXED = (
    *("mixed-sizes-sd3", "mixed-sizes-less-gain", "mixed-sizes-more-gain"),
    *("mixed-sizes-noise", "mixed-sizes-bursts"),
)
_FCFS_SATISFIES = 0.6
# by rate and mix, points over the best static policy: required and aimed at
_OVER_STATIC = (
    *((12.0, "uniform", 5.0, 6.0), (12.0, "skewed", 6.0, 7.0)),
    *((18.0, "uniform", 7.0, 8.5), (18.0, "skewed", 8.0, 9.5)),
)
# by mix, points below the bound: required and aimed at
_GAPS = {"uniform": (1.5, 1.0), "skewed": (1.5, 1.2)}
_UNLIKE_TABLE_A = ("sp-noise", "sp-switch-0", "sp-switch-100", "sp-times-wrong", "sp-bursts")


@dataclass(frozen=True, slots=True)
class Headline:
    """An aim, with the same figure of other experiments.

    Attributes:
        group: of aims that stand in one table.
        others: the figure under other conditions, by experiment; the first is the worst.
    """

    group: str
    aim: Aim
    others: tuple[tuple[str, Mean], ...] = ()


def headlines(results: Results) -> list[Headline]:
    """Return all aims that there are figures for.

    Raises:
        LookupError, TypeError: figures are of other cells than the aims need.
    """
    return [*_mixed_sizes(results), *_groups(results), *_control_loops(results)]


def samples_of(figures: Figures, **wanted: Any) -> list[float]:
    """Return one attainment per seed, mean over all cells whose keys have these values."""
    cells = [one for one in figures["cells"] if all(one[key] == wanted[key] for key in wanted)]
    if not cells:
        raise LookupError(f"no cell has {wanted}")
    return [sum(one) / len(cells) for one in zip(*(one["samples"] for one in cells), strict=True)]


def gain(figures: Figures, first: str, second: str, **wanted: Any) -> Mean:
    """Return by how many points the first policy is above the second, paired by seed."""
    ours = samples_of(figures, policy=first, **wanted)
    return paired_difference(ours, samples_of(figures, policy=second, **wanted)).times(100)


def read_mean(figures: Mapping[str, Any], factor: float = 100) -> Mean:
    """Return a mean as files have it; a share in percentage points."""
    half_width = math.nan if figures["half_width"] is None else figures["half_width"]
    return Mean(figures["value"], half_width, figures["num"]).times(factor)


def _elsewhere(
    results: Results,
    names: Iterable[str],
    figure: Callable[[Figures], Mean],
    *,
    highest_first: bool = False,
) -> tuple[tuple[str, Mean], ...]:
    found = [(name, figure(results[name])) for name in names if name in results]
    return tuple(sorted(found, key=lambda one: one[1].value, reverse=highest_first))


def _is_variant(results: Results, head: str, name: str) -> bool:
    """Whether an experiment is another one with something changed, but its models."""
    models = [results[one]["experiment"].get("light_profile") for one in (head, name)]
    return name.startswith(f"{head}-") and models[0] == models[1]


def _judge(
    aim: Callable[..., Aim], text: str, wanted: float, found: Mean, unit: str = "points"
) -> Aim:
    low, high = found.value - found.half_width, found.value + found.half_width
    return aim(text, wanted, found.value, (low, high), unit)


def _mixed_sizes(results: Results) -> Iterator[Headline]:
    if _MIXED not in results:
        return
    group, figures = "Mixed resolutions", results[_MIXED]
    if (crossing := _where_fcfs_is_at(figures, _FCFS_SATISFIES)) is not None:
        found, low, high = crossing
        text = f"over FCFS where it satisfies {_FCFS_SATISFIES:.0%}, between {low:g} and {high:g}/s"
        yield Headline(group, _judge(at_least, text, 30, found))
    worst, rate = _over_algorithm_1(figures)
    text = f"over Algorithm 1 (`slack`) at the worst rate ({rate:g}/s)"
    others = _elsewhere(results, _UNLIKE_MIXED, lambda one: _over_algorithm_1(one)[0])
    yield Headline(group, _judge(at_least, text, 0, worst), others)
    worst, rate = _false_refusals(figures)
    text = f"refused though in time if all were admitted, % of arrivals, worst rate ({rate:g}/s)"
    others = _elsewhere(
        results, _UNLIKE_MIXED, lambda one: _false_refusals(one)[0], highest_first=True
    )
    yield Headline(group, _judge(at_most, text, 5, worst, "%"), others)


def _where_fcfs_is_at(figures: Figures, share: float) -> tuple[Mean, float, float] | None:
    """Return the gain over FCFS where it satisfies a share, and between which rates that is.

    On the line between the two rates, seed by seed; None if FCFS never falls through it.
    """

    def samples(policy: str, rate: float) -> list[float]:
        return samples_of(figures, policy=policy, rate_per_s=rate)

    for rates in pairwise(figures["experiment"]["rates_per_s"]):
        above, below = (mean_of(samples("fcfs", rate)).value for rate in rates)
        if above >= share > below:
            part = (above - share) / (above - below)
            low, high = (
                [a - b for a, b in zip(samples("deadline", r), samples("fcfs", r), strict=True)]
                for r in rates
            )
            mixed = [(1 - part) * a + part * b for a, b in zip(low, high, strict=True)]
            return mean_of(mixed).times(100), *rates
    return None


def _over_algorithm_1(figures: Figures) -> tuple[Mean, float]:
    rates = figures["experiment"]["rates_per_s"]
    gains = [(gain(figures, "deadline", "slack", rate_per_s=rate), rate) for rate in rates]
    return min(gains, key=lambda one: one[0].value)


def _false_refusals(figures: Figures) -> tuple[Mean, float]:
    shares = [(read_mean(one["of_arrivals"]), one["load"]) for one in figures["false_refusals"]]
    return max(shares, key=lambda one: one[0].value)


def _groups(results: Results) -> Iterator[Headline]:
    group = "Sequence-parallel rounds"
    for rate, mix, least, aim in _OVER_STATIC:
        name = f"sp-table-a-{rate:g}"
        if name not in results or mix not in results[name]["experiment"]["mixes"]:
            continue

        def figure(figures: Figures, mix: str = mix, rate: float = rate) -> Mean:
            return gain(figures, "rounds/most", "best_static", mix=mix, rate_per_min=rate)

        found = figure(results[name])
        text = f"{mix}, {rate:g}/min: over the best static, mean over scales"
        others = _elsewhere(
            results, ("sp-table-b", *(_UNLIKE_TABLE_A if rate == 12 else ())), figure
        )
        yield Headline(group, _judge(at_least, text, least, found), others)
        yield Headline(group, _judge(may_be_at_least, "the same", aim, found))
    if "sp-table-a-12" in results:
        figures = results["sp-table-a-12"]
        for mix in figures["experiment"]["mixes"]:
            gaps = [
                (gain(figures, "bound", "rounds/most", mix=mix, scale=scale), scale)
                for scale in figures["experiment"]["scales"]
            ]
            worst, scale = max(gaps, key=lambda one: one[0].value)
            must, aim = _GAPS[mix]
            text = f"{mix}, 12/min: below what no schedule exceeds, worst scale ({scale:g})"
            yield Headline(group, _judge(at_most, text, must, worst))
            yield Headline(group, _judge(may_be_at_most, "the same", aim, worst))
    tables = [results[name] for name in results if name.startswith("sp-table-a-")]
    cells = [(figures, where) for figures in tables for where in _cells(figures)]
    if cells:
        yield from _worst_cells(group, cells)


Where = Mapping[str, Any]


def _cells(figures: Figures) -> Iterator[Where]:
    experiment = figures["experiment"]
    for mix in experiment["mixes"]:
        for rate in experiment["rates_per_min"]:
            for scale in experiment["scales"]:
                yield {"mix": mix, "rate_per_min": rate, "scale": scale}


def _words(where: Where) -> str:
    return f"{where['mix']}, {where['rate_per_min']:g}/min, scale {where['scale']:g}"


def _worst_cells(group: str, cells: list[tuple[Figures, Where]]) -> Iterator[Headline]:
    """Ours beside `widest`, and what the guard of large requests keeps and costs."""
    found = [(gain(one, "rounds/most", "widest", **where), where) for one, where in cells]
    worst, where = min(found, key=lambda one: one[0].value)
    text = f"over `widest`, worst of all cells ({_words(where)})"
    yield Headline(group, _judge(at_least, text, -0.3, worst))
    wide = [(one, where) for one, where in cells if where["scale"] >= 1.3]
    kept = [
        (_large(one, "rounds/large", where), _large(one, "best_static", where), where)
        for one, where in wide
    ]
    ours, theirs, where = min(kept, key=lambda one: one[0].value - one[1].value)
    # the interval of a difference of means is at most as wide as both together
    least = Mean(ours.value - theirs.value, ours.half_width + theirs.half_width, ours.num)
    text = f"guard: points of 2048 px over the best static policy, worst cell ({_words(where)})"
    yield Headline(group, _judge(at_least, text, -1.5, least))
    costs = [(gain(one, "rounds/most", "rounds/large", **where), where) for one, where in wide]
    cost, where = max(costs, key=lambda one: one[0].value)
    text = f"guard: points of all requests that it costs, worst cell ({_words(where)})"
    yield Headline(group, _judge(at_most, text, 0.5, cost))


def _large(figures: Figures, policy: str, where: Where) -> Mean:
    wanted = {**where, "policy": policy}
    (cell,) = (one for one in figures["cells"] if all(one[key] == wanted[key] for key in wanted))
    return read_mean(cell["by_class"]["2048"])


def _control_loops(results: Results) -> Iterator[Headline]:
    def own(name: str, factor: float) -> Callable[[Figures], Mean]:
        """A figure of the first policy."""
        return lambda figures: read_mean(figures["policies"][0][name], factor)

    def over_rival(name: str) -> Callable[[Figures], Mean]:
        """By how much a figure of the first policy is above Ray Serve's, paired by seed."""

        def figure(figures: Figures) -> Mean:
            rows = figures["first_minus_others"]
            (row,) = (one for one in rows if one["policy"] == "ongoing-requests")
            return read_mean(row[name], 1)

        return figure

    rival = "more than under Ray Serve's ongoing requests"
    fid = "FID of the published table at the time-mean deferral"
    on_time = "on time, % (what settings are searched for)"
    day = "Control loop over a day"
    wanted: tuple[tuple[str, str, Callable[..., Aim], str, float, Any, str], ...] = (
        ("cascade", "Cascade", at_most, "violations, %", 2.0, own("violations", 100), "%"),
        ("cascade", "Cascade", at_most, fid, 17.0, own("fid", 1), ""),
        ("autoscaling", day, at_least, on_time, 99.5, own("attainment", 100), "%"),
        *(
            ("autoscaling", day, at_most, f"{unit} {rival}", 0.0, over_rival(name), unit)
            for name, unit in (("gpu_hours", "GPU-hours"), ("num_plan_changes", "changes"))
        ),
    )
    for kind, group, aim, text, level, figure, unit in wanted:
        if kind in results:
            variants = [name for name in results if _is_variant(results, kind, name)]
            others = _elsewhere(results, variants, figure, highest_first=aim is at_most)
            yield Headline(group, _judge(aim, text, level, figure(results[kind]), unit), others)
