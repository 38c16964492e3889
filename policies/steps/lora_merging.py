"""When the LoRAs of a replica are merged into its model's weights, and when they are taken out.

A step whose rows all have one set of LoRAs takes longer by what their low-rank products add. With
merged weights nothing is added, but these have to be made first, and no other rows can be stepped
with them. Whether that pays depends on how long the set goes on to be alone, which nobody knows:

    Renting skis or buying them. As long as it is not merged, the set costs ``delta_s`` a step (the
    rent). Merging costs ``make_s + swap_s`` once (the price). If it is bought when the rent paid so
    far reaches the price, then whatever comes, no more than twice of what would have been best is
    paid, and no rule without a forecast can promise less (Karlin et al., Competitive Snoopy
    Caching, section 3).

Where the latest requests allow a forecast it is merged earlier: when what it is expected to save is
``MARGIN`` times the price. The margin is the hysteresis: a set that comes and goes is not merged
each time. Requests of other sets come first in any case: to put the model's own weights back costs
microseconds, so that nobody has to wait for a saving.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MergeChoice = Literal["merge", "stay", "unmerge"]

# of the price, that has to be saved in the mean
MARGIN = 2.0
# requests of one set in a row that are foreseen at most: what is popular changes
MOST_FORESEEN = 64.0
# share of a step by which merged weights must be measured slower before they are given up
_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class MergedRun:
    """Some rows of one set, stepped with merged weights.

    Attributes:
        step_s: seconds of one of their steps.
        make_s: seconds to make the merged weights, as far as they are not there.
        swap_s: seconds to put them in place and the model's own back, notices included.
    """

    step_s: float
    make_s: float
    swap_s: float

    @property
    def price_s(self) -> float:
        """What is paid once."""
        return self.make_s + self.swap_s


@dataclass(frozen=True, slots=True)
class MergeView:
    """What the decision over one replica's most common set depends on.

    Attributes:
        is_merged: whether it is merged now.
        run: its rows on the replica.
        delta_s: seconds that their deltas add to a step.
        paid_s: seconds that they have added since rows of other sets were last stepped.
        num_others: requests with other sets or with none that the replica holds, or that wait and
            can go nowhere else.
        share: of the latest requests on the replica that have the set, in [0, 1].
        steps_left: steps until the last of the rows is done.
        steps_per_request: by which one more request lengthens that.
    """

    is_merged: bool
    run: MergedRun
    delta_s: float
    paid_s: float = 0.0
    num_others: int = 0
    share: float = 1.0
    steps_left: float = 0.0
    steps_per_request: float = 0.0


def decide_merge(view: MergeView) -> MergeChoice:
    """Return what becomes of a replica's weights at this step boundary."""
    run = view.run
    if view.is_merged:
        is_slower = view.delta_s < -_TOLERANCE * run.step_s
        return "unmerge" if view.num_others or is_slower else "stay"
    if view.num_others or view.delta_s <= 0:
        return "stay"
    saved_s = merging_saves_s(foreseen_steps(view), run.step_s + view.delta_s, [run])
    is_worth_it = saved_s >= (MARGIN - 1) * run.price_s
    return "merge" if is_worth_it or view.paid_s >= run.price_s else "stay"


def foreseen_steps(view: MergeView) -> float:
    """Return the steps that are expected before a request of another set comes.

    If each request has the set with the probability ``p``, ``p / (1 - p)`` of them are expected in
    a row.
    """
    further = MOST_FORESEEN
    if view.share < 1:
        further = min(MOST_FORESEEN, view.share / (1 - view.share))
    return view.steps_left + further * view.steps_per_request


def merging_saves_s(num_steps: float, grouped_s: float, runs: Sequence[MergedRun]) -> float:
    """Return the seconds saved by stepping sets one after the other with merged weights.

    Args:
        num_steps: of every row.
        grouped_s: seconds of a step of all rows together, with their deltas.
        runs: the rows by their sets.
    """
    return num_steps * grouped_s - sum(one.price_s + num_steps * one.step_s for one in runs)
