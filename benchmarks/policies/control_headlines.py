"""Headlines of planned clusters: a cascade's day, and a day of autoscaling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.policies.figures import Figures, Results, read_mean
from benchmarks.policies.headlines import Headline, elsewhere, stated
from benchmarks.verdicts import at_least, at_most
from ray_cluster.simulator.intervals import Mean

_CASCADE, _DAY = "cascade", "autoscaling"
_GROUPS = {_CASCADE: "Cascade", _DAY: "Control loop over a day"}
_RIVAL = "ongoing-requests"
# that settings were searched for
_LEAST_ON_TIME = 99.5


def control_headlines(results: Results) -> Iterator[Headline]:
    """Return what there are figures for."""
    if _CASCADE in results:
        yield _at_most(results, "violations, %", 2.0, partial(_own, name="violations", factor=100))
        text = "FID of the published table at the time-mean deferral"
        yield _at_most(results, text, 17.0, partial(_own, name="fid", factor=1), unit="")
    if _DAY in results:
        figure = partial(_own, name="attainment", factor=100)
        others = elsewhere(results, _variants(results, _DAY), figure)
        found = stated(figure(results[_DAY]))
        aim = at_least("on time, % (what settings are searched for)", _LEAST_ON_TIME, *found, "%")
        yield Headline(_GROUPS[_DAY], _DAY, aim, others)
        for name, unit in (("gpu_hours", "GPU-hours"), ("num_plan_changes", "changes")):
            figure = partial(_over_rival, name=name)
            others = elsewhere(results, _variants(results, _DAY), figure, highest_first=True)
            text = f"{unit} more than under Ray Serve's ongoing requests"
            aim = at_most(text, 0, *stated(figure(results[_DAY])), unit)
            yield Headline(_GROUPS[_DAY], _DAY, aim, others)


def _at_most(
    results: Results, text: str, most: float, figure: partial[Mean], unit: str = "%"
) -> Headline:
    others = elsewhere(results, _variants(results, _CASCADE), figure, highest_first=True)
    aim = at_most(text, most, *stated(figure(results[_CASCADE])), unit)
    return Headline(_GROUPS[_CASCADE], _CASCADE, aim, others)


def _variants(results: Results, kind: str) -> list[str]:
    return [name for name in results if name.startswith(f"{kind}-")]


def _own(figures: Figures, *, name: str, factor: float) -> Mean:
    """A figure of the first policy."""
    return read_mean(figures["policies"][0][name], factor)


def _over_rival(figures: Figures, *, name: str) -> Mean:
    """By how much a figure of the first policy is above Ray Serve's, paired by seed."""
    (row,) = (one for one in figures["first_minus_others"] if one["policy"] == _RIVAL)
    return read_mean(row[name], 1)
