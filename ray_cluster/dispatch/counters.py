"""How requests have ended, counted for metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from ray_cluster.dispatch.prediction_stats import PredictionStats
from ray_cluster.dispatch.refusals import Refusals
from ray_cluster.policies.types import RequestView

# real over predicted seconds: within 10 % and 25 % stand on both sides of 1
RATIO_BOUNDS = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
# failures that say nothing of the service: their clients called these off, or asked wrongly
CALLERS_OWN = frozenset({"aborted", "invalid"})


@dataclass(frozen=True, slots=True)
class Ratios:
    """A histogram of real over predicted seconds.

    Attributes:
        counts: of the ratios up to each of ``RATIO_BOUNDS``, and of those above; not cumulative.
        total: of all ratios.
    """

    counts: tuple[int, ...] = (0,) * (len(RATIO_BOUNDS) + 1)
    total: float = 0.0

    def plus(self, ratio: float) -> Ratios:
        """Return it with one more."""
        place, counts = bisect_left(RATIO_BOUNDS, ratio), list(self.counts)
        counts[place] += 1
        return Ratios(tuple(counts), self.total + ratio)


def size_class(view: RequestView) -> str:
    """Return the side, a power of two, of the smallest square with at least a request's pixels."""
    side = 1
    while side * side < view.width_px * view.height_px:
        side *= 2
    return str(side)


class OutcomeCounters:
    """Counts the ends of a cell's requests.

    Args:
        learnt: how far off predictions were.

    Attributes:
        met: images that ended by their deadlines, by model and size class; and
        missed: those that ended later or not at all, but for those of ``CALLERS_OWN`` ends.
        made: images made, by model and the fidelity that they got; ``unknown`` where fewer steps
            were allowed than anything is known of.
        ratios: of those that were made, by model.
        refusals: images that were not let in.
    """

    def __init__(self, learnt: PredictionStats) -> None:
        self.refusals = Refusals(learnt)
        self.met: Counter[tuple[str, str]] = Counter()
        self.missed: Counter[tuple[str, str]] = Counter()
        self.made: Counter[tuple[str, str]] = Counter()
        self._ratios: defaultdict[str, Ratios] = defaultdict(Ratios)

    @property
    def ratios(self) -> Mapping[str, Ratios]:
        """See above."""
        return self._ratios

    def ended(self, view: RequestView, *, is_met: bool) -> None:
        """Count an end."""
        (self.met if is_met else self.missed)[view.model, size_class(view)] += 1

    def took(self, model: str, *, took_s: float, predicted_s: float) -> None:
        """Count how far off a prediction was, if there was one."""
        if predicted_s > 0:
            self._ratios[model] = self._ratios[model].plus(took_s / predicted_s)
