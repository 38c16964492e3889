"""Headlines of requests of several sizes on replicas of one device each."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from benchmarks.policies.figures import Figures, Results, gain, points, read_mean, samples_of
from benchmarks.policies.headlines import Headline, elsewhere, stated
from benchmarks.verdicts import at_least, at_most
from ray_cluster.simulator.intervals import Mean, mean_of

_GROUP = "Mixed resolutions"
_DEADLINE, _FCFS, _ALGORITHM_1 = "deadline", "fcfs", "slack"
_MIXED = "mixed-sizes"
_UNLIKE_MIXED = (
    *("mixed-sizes-sd3", "mixed-sizes-less-gain", "mixed-sizes-more-gain"),
    *("mixed-sizes-noise", "mixed-sizes-bursts"),
)
_FCFS_SATISFIES = 0.6


def mixed_sizes_headlines(results: Results) -> Iterator[Headline]:
    if _MIXED not in results:
        return
    figures = results[_MIXED]
    crossing = _where_fcfs_is_at(figures, _FCFS_SATISFIES)
    if crossing is not None:
        found, low, high = crossing
        text = f"over FCFS where it satisfies {_FCFS_SATISFIES:.0%}, between {low:g} and {high:g}/s"
        yield Headline(_GROUP, _MIXED, at_least(text, 30, *stated(found), "points"))
    others = elsewhere(results, _UNLIKE_MIXED, lambda one: _over_algorithm_1(one)[0])
    worst, rate = _over_algorithm_1(figures)
    text = f"over Algorithm 1 (`slack`) at the worst rate ({rate:g}/s)"
    yield Headline(_GROUP, _MIXED, at_least(text, 0, *stated(worst), "points"), others)
    others = elsewhere(
        results, _UNLIKE_MIXED, lambda one: _false_refusals(one)[0], highest_first=True
    )
    worst, rate = _false_refusals(figures)
    text = f"refused though in time if all were let in, % of arrivals, worst rate ({rate:g}/s)"
    yield Headline(_GROUP, _MIXED, at_most(text, 5, *stated(worst), "%"), others)


def _where_fcfs_is_at(figures: Figures, share: float) -> tuple[Mean, float, float] | None:
    """Return the gain over FCFS where it satisfies a share, between which rates that is.

    On the line between the two rates, seed by seed; None if its attainment never falls through it.
    """
    rates = figures["experiment"]["rates_per_s"]
    for low, high in pairwise(rates):
        above, below = (_attainment(figures, _FCFS, rate) for rate in (low, high))
        if above >= share > below:
            part = (above - share) / (above - below)
            gains = [
                [
                    ours - theirs
                    for ours, theirs in zip(
                        samples_of(figures, policy=_DEADLINE, rate_per_s=rate),
                        samples_of(figures, policy=_FCFS, rate_per_s=rate),
                        strict=True,
                    )
                ]
                for rate in (low, high)
            ]
            mixed = [(1 - part) * a + part * b for a, b in zip(*gains, strict=True)]
            return points(mean_of(mixed)), low, high
    return None


def _attainment(figures: Figures, policy: str, rate: float) -> float:
    return mean_of(samples_of(figures, policy=policy, rate_per_s=rate)).value


def _over_algorithm_1(figures: Figures) -> tuple[Mean, float]:
    rates = figures["experiment"]["rates_per_s"]
    gains = [(gain(figures, _DEADLINE, _ALGORITHM_1, rate_per_s=rate), rate) for rate in rates]
    return min(gains, key=lambda one: one[0].value)


def _false_refusals(figures: Figures) -> tuple[Mean, float]:
    shares = [
        (read_mean(found["of_arrivals"]), found["load"]) for found in figures["false_refusals"]
    ]
    return max(shares, key=lambda one: one[0].value)
