"""What a replica steps without looking at deadlines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.steps.step_policy import StepDecision, StepView
from ray_cluster.policies.types import RequestView, RowView


def _arrived(row: RowView) -> tuple[float, str]:
    return (row.request.arrival_s, row.request.request_id)


def _until_first_ends(requests: Sequence[RequestView]) -> StepDecision:
    ids = tuple(one.request_id for one in requests)
    return StepDecision(ids, min(one.remaining_steps for one in requests))


@dataclass(frozen=True, slots=True)
class FixedBatches:
    """Makes images of one size from their first step to their last; no row joins on the way.

    First come, first served: the size is that of the longest-waiting row. A cap of 1 makes one
    image after the other.

    Attributes:
        max_batch: most images at once.
        wait_s: how long the first of a batch waits for more of its size.
    """

    max_batch: int
    wait_s: float = 0.0

    def __post_init__(self) -> None:
        if self.max_batch < 1 or not (0 <= self.wait_s < math.inf):
            raise ValueError(
                "batches need a cap of 1 or more and a finite wait; given "
                f"{self.max_batch} and {self.wait_s}"
            )

    def __call__(self, view: StepView) -> StepDecision:
        """Decide; a :data:`ray_cluster.policies.steps.step_policy.StepPolicy`."""
        rows = sorted(view.rows, key=_arrived)
        begun = [row.request for row in rows if row.request.steps_done]
        if begun:
            return _until_first_ends(begun)
        alike = [row.request for row in rows if row.request.size_px == rows[0].request.size_px]
        starts_s = rows[0].request.arrival_s + self.wait_s
        if len(alike) < self.max_batch and view.now_s < starts_s:
            return StepDecision(idle_until_s=starts_s)
        return _until_first_ends(alike[: self.max_batch])


@dataclass(frozen=True, slots=True)
class InTimeBatches:
    """Makes all images that a replica holds in one batch, except those that would be late in it.

    The most urgent is judged first, and each that is dropped makes the batch shorter for the
    others. Nothing begins in the same decision: other requests can take the free slots first.
    DiffServe's workers drop like this.

    Attributes:
        batch_s: seconds of a batch of so many images.
    """

    batch_s: Callable[[int], float]

    def __call__(self, view: StepView) -> StepDecision:
        """Decide; a :data:`ray_cluster.policies.steps.step_policy.StepPolicy`."""
        requests = sorted((row.request for row in view.rows), key=queue_key)
        begun = [one for one in requests if one.steps_done]
        if begun:
            return _until_first_ends(begun)
        num_late = self._num_late(requests, view.now_s)
        if num_late:
            return StepDecision(dropped=tuple(one.request_id for one in requests[:num_late]))
        return _until_first_ends(requests)

    def _num_late(self, requests: Sequence[RequestView], now_s: float) -> int:
        """How many of the most urgent can't be in time, each beside all that come after it."""
        for number, one in enumerate(requests):
            if now_s + self.batch_s(len(requests) - number) <= one.deadline_s:
                return number
        return len(requests)


def take_turns_by_size(view: StepView) -> StepDecision:
    """Step the rows of one size after those of another; new rows join at the next turn.

    Iteration-level batching (Orca) with one batch per resolution.
    """
    sizes = {row.request.size_px for row in view.rows}
    # the size that has waited for longest; a row that joins late does not bring its size forward
    waited = {
        size: max(row.waited_rounds for row in view.rows if row.request.size_px == size)
        for size in sizes
    }
    turn = max(sizes, key=lambda size: (waited[size], size))
    rows = sorted((row for row in view.rows if row.request.size_px == turn), key=_arrived)
    requests = [row.request for row in rows[: view.max_batch]]
    if len(requests) == len(view.rows):
        return _until_first_ends(requests)
    return StepDecision(tuple(one.request_id for one in requests))


def mix_as_they_come(view: StepView) -> StepDecision:
    """Step rows of all sizes together up to the cap, first come first.

    PatchedServe's own control, PatchedCache (section 8), batches like this.
    """
    rows = sorted(view.rows, key=_arrived)
    requests = [row.request for row in rows[: view.max_batch]]
    return _until_first_ends(requests) if requests else StepDecision()
