"""Headlines of the sequence-parallel rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.policies.figures import Figures, Results, cells_of, gain, read_mean
from benchmarks.policies.headlines import Headline, elsewhere, stated
from benchmarks.verdicts import at_least, at_most, may_be_at_least, may_be_at_most
from ray_cluster.simulator.intervals import Mean

_GROUP = "Sequence-parallel rounds"
_OURS, _GUARDED, _STATIC, _P8, _BOUND = (
    *("rounds/most", "rounds/large", "best_static", "widest", "bound"),
)
_UNLIKE_TABLE_A = ("sp-noise", "sp-switch-0", "sp-switch-100", "sp-times-wrong", "sp-bursts")
_LARGE = "2048"
_TABLE = "sp-table-a-12"


# by rate and mix, points over the best static policy: those that there must be, and the aim
_WANTED = (
    *((12.0, "uniform", 5.0, 6.0), (12.0, "skewed", 6.0, 7.0)),
    *((18.0, "uniform", 7.0, 8.5), (18.0, "skewed", 8.0, 9.5)),
)
_GAPS = {"uniform": (1.5, 1.0), "skewed": (1.5, 1.2)}


def sequence_parallel_headlines(results: Results) -> Iterator[Headline]:
    """Return what there are figures for."""
    for rate, mix, least, aim in _WANTED:
        name = f"sp-table-a-{rate:g}"
        if name in results and mix in results[name]["experiment"]["mixes"]:
            yield from _over_static(results, name, {"mix": mix, "rate_per_min": rate}, least, aim)
    if "sp-table-a-12" in results:
        yield from _gaps_to_the_bound(results["sp-table-a-12"])
    tables = {name: results[name] for name in results if name.startswith("sp-table-a-")}
    if tables:
        yield from _beside_p8(tables)
        yield from _guard(tables)


def _over_static(
    results: Results, name: str, where: dict[str, Any], least: float, aim: float
) -> Iterator[Headline]:
    def figure(figures: Figures) -> Mean:
        return gain(figures, _OURS, _STATIC, **where)

    found = stated(figure(results[name]))
    text = f"{where['mix']}, {where['rate_per_min']:g}/min: over the best static, mean over scales"
    unlike = ("sp-table-b", *(_UNLIKE_TABLE_A if where["rate_per_min"] == 12 else ()))
    others = elsewhere(results, unlike, figure)
    yield Headline(_GROUP, name, at_least(text, least, *found, "points"), others)
    yield Headline(_GROUP, name, may_be_at_least("the same", aim, *found, "points"))


def _gaps_to_the_bound(figures: Figures) -> Iterator[Headline]:
    for mix in figures["experiment"]["mixes"]:
        gaps = [
            (gain(figures, _BOUND, _OURS, mix=mix, scale=scale), scale)
            for scale in figures["experiment"]["scales"]
        ]
        worst, scale = max(gaps, key=lambda one: one[0].value)
        must, aim = _GAPS[mix]
        text = f"{mix}, 12/min: below what no schedule exceeds, worst scale ({scale:g})"
        yield Headline(_GROUP, _TABLE, at_most(text, must, *stated(worst), "points"))
        yield Headline(_GROUP, _TABLE, may_be_at_most("the same", aim, *stated(worst), "points"))


def _every_cell(tables: Mapping[str, Figures]) -> Iterator[tuple[str, dict[str, float | str]]]:
    for name, figures in tables.items():
        experiment = figures["experiment"]
        for mix in experiment["mixes"]:
            for rate in experiment["rates_per_min"]:
                for scale in experiment["scales"]:
                    yield name, {"mix": mix, "rate_per_min": rate, "scale": scale}


def _words(where: Mapping[str, float | str]) -> str:
    return f"{where['mix']}, {where['rate_per_min']:g}/min, scale {where['scale']:g}"


def _beside_p8(tables: Mapping[str, Figures]) -> Iterator[Headline]:
    found = [
        (gain(tables[name], _OURS, _P8, **where), name, where)
        for name, where in _every_cell(tables)
    ]
    worst, name, where = min(found, key=lambda one: one[0].value)
    text = f"over P8, worst of all cells ({_words(where)})"
    yield Headline(_GROUP, name, at_least(text, -0.3, *stated(worst), "points"))


def _guard(tables: Mapping[str, Figures]) -> Iterator[Headline]:
    """The policy with the guard: what it keeps of the largest class, and what that costs."""
    cells = [one for one in _every_cell(tables) if float(one[1]["scale"]) >= 1.3]
    kept = [
        (_large(tables[name], _GUARDED, where), _large(tables[name], _STATIC, where), name, where)
        for name, where in cells
    ]
    ours, theirs, name, where = min(kept, key=lambda one: one[0].value - one[1].value)
    # of the difference of two means the interval is at most as wide as both together
    least = Mean(ours.value - theirs.value, ours.half_width + theirs.half_width, ours.num)
    text = f"guard: points of 2048 px over the best static policy, worst cell ({_words(where)})"
    yield Headline(_GROUP, name, at_least(text, -1.5, *stated(least), "points"))
    costs = [(gain(tables[name], _OURS, _GUARDED, **where), name, where) for name, where in cells]
    cost, name, where = max(costs, key=lambda one: one[0].value)
    text = f"guard: points of all requests that it costs, worst cell ({_words(where)})"
    yield Headline(_GROUP, name, at_most(text, 0.5, *stated(cost), "points"))


def _large(figures: Figures, policy: str, where: Mapping[str, float | str]) -> Mean:
    (cell,) = cells_of(figures, policy=policy, **where)
    return read_mean(cell["by_class"][_LARGE])
