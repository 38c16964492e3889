"""What was refused, and whether that was right, by hindsight."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Literal

from ray_cluster.dispatch.prediction_stats import PredictionStats
from ray_cluster.policies.prediction_error import RECENT
from ray_cluster.policies.types import Offer, RequestView

Verdict = Literal["right", "false"]
# refusals that wait for their verdicts; beyond it none are added
_MOST_OPEN = 10_000
_OTHER = "other"


class Refusals:
    """Counts the images that were not let in.

    One that was refused as too late was not made, so nobody can know whether it would have been in
    time. It is told from what came after it: the factor by which predictions could have been
    exceeded with nobody late is held against that by which they were, of the next images that
    were predicted in the same way, their median. (Of 153 such images, let in one at a time
    in the simulator, 127 were in time, 78 of them with nobody else late for it; 100 are judged
    false.)

    Args:
        learnt: how far off predictions were.

    Attributes:
        counts: images by model and reason.
        verdicts: those of them that were refused as too late, by model and verdict.
    """

    def __init__(self, learnt: PredictionStats) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.verdicts: Counter[tuple[str, Verdict]] = Counter()
        self._learnt = learnt
        # by model and way of predicting: after how many ends, of how many images, what was bearable
        self._open: defaultdict[tuple[str, bool], deque[tuple[int, int, float]]] = defaultdict(
            lambda: deque(maxlen=_MOST_OPEN)
        )

    def add(self, group: Sequence[RequestView], offer: Offer) -> None:
        """Count a group that was refused."""
        if not group:
            return
        # anybody can call for models that there are not: that must not be a label each
        model = _OTHER if offer.reason == "unknown_model" else group[0].model
        self.counts[model, str(offer.reason)] += len(group)
        if offer.reason == "too_late":
            ends = self._learnt.num_ended(model, is_followed=offer.is_followed)
            waiting = self._open[model, offer.is_followed]
            waiting.append((ends + RECENT, len(group), offer.bearable))

    def judge(self, model: str, *, is_followed: bool) -> None:
        """Judge those after which enough images have ended; one that was predicted so just has."""
        waiting = self._open[model, is_followed]
        ends = self._learnt.num_ended(model, is_followed=is_followed)
        while waiting and waiting[0][0] <= ends:
            _, count, bearable = waiting.popleft()
            exceeded = self._learnt.error(model, is_followed=is_followed).recent
            self.verdicts[model, "right" if exceeded > bearable else "false"] += count
