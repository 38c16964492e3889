"""Which rows step together on a replica whose batches may mix sizes.

Every row that joins makes the step longer for all, and the device do more per second. So rows join
in the order of their urgency for as long as no row in the batch that can still be in time would be
late because of it. (PatchedServe, section 5.2, stops at a running request that would be late, too;
its gain in throughput, equation 1, is a harmonic ratio that falls as batching helps, and is not
used: with a fixed cost per step every further row gains.) Rows that were left out for too long come
first whatever that costs the others, which bounds every row's wait:

    A row steps at least once in any ``4 * num_batches + 1`` rounds, where ``num_batches`` is the
    largest number of full batches, over those rounds, that all rows would fill.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from ray_cluster.policies.costs.cost_model import own_s
from ray_cluster.policies.leasing.ordering import QueueKey, queue_key
from ray_cluster.policies.steps.step_policy import StepDecision, StepView
from ray_cluster.policies.types import RowView, StepCost

_ROUNDING = 1e-9


@dataclass(slots=True, eq=False)
class Candidate:
    """A row that could step.

    Attributes:
        key: its place in the queue's order; holds its deadline.
        left: steps to take.
        own_s: seconds that it adds to a step.
        share: which part of a full batch it is.
        overdue: rounds for which it was left out, if these are too many; else 0.
    """

    key: QueueKey
    left: float
    own_s: float
    size_px: tuple[int, int]
    share: float
    overdue: int = 0


CandidateT = TypeVar("CandidateT", bound=Candidate)


def choose_batch(
    candidates: Iterable[CandidateT], cost: StepCost, now_s: float
) -> list[CandidateT]:
    """Return the rows that step together, the first of them first; all of one row alone."""
    fixed_s, further_s = cost.fixed_s, min(cost.per_further_size_s, cost.fixed_s)

    def rank(row: CandidateT) -> tuple[int, bool, int, bool, QueueKey]:
        key = row.key
        hopeless = now_s + row.left * (fixed_s + row.own_s) > key[1]
        return (-row.overdue, hopeless, key[0], key[1] < now_s, key)

    ranked = sorted(candidates, key=rank)
    # no row fits into less capacity than this
    least = min([row.share for row in ranked], default=0.0) - _ROUNDING
    batch: list[CandidateT] = []
    sizes: set[tuple[int, int]] = set()
    share, rows_s, most_s = 0.0, 0.0, math.inf
    for row in ranked:
        # the longest step with which it is in time; any, if none is short enough
        tolerable_s = (row.key[1] - now_s) / row.left
        if tolerable_s < fixed_s + row.own_s or tolerable_s > most_s:
            tolerable_s = most_s
        if batch:
            if share + row.share > 1 + _ROUNDING:
                continue
            further = len(sizes) - (row.size_px in sizes)
            longer_s = fixed_s + rows_s + row.own_s + further_s * further
            if not row.overdue and longer_s > tolerable_s:
                continue
        batch.append(row)
        sizes.add(row.size_px)
        share, rows_s, most_s = share + row.share, rows_s + row.own_s, tolerable_s
        if share + least > 1:
            break
    return batch


def mixed_batches(view: StepView) -> StepDecision:
    """Decide as engines may whose batches mix sizes; the rows' order does not matter."""
    if not view.rows:
        return StepDecision()
    patience = patience_of(num_batches(view))
    candidates = [_candidate(row, view, patience) for row in view.rows]
    batch = choose_batch(candidates, view.step_cost, view.now_s)
    ids = tuple(row.key[-1] for row in batch)
    # a row that is left out may fit in after a step
    return StepDecision(ids) if len(batch) < len(view.rows) else _with_all(batch, ids, view)


def _with_all(batch: list[Candidate], ids: tuple[str, ...], view: StepView) -> StepDecision:
    """Decide for all rows until one of them could no longer be in time with the others, or again.

    A row's slack is against steps of this batch, and what it lacks against steps of it alone.
    """
    num_rounds = int(min(row.left for row in batch))
    if num_rounds == 1 or len(batch) == 1:
        return StepDecision(ids, num_rounds)
    cost = view.step_cost
    further_s = min(cost.per_further_size_s, cost.fixed_s)
    further = len({row.size_px for row in batch}) - 1
    together_s = cost.fixed_s + sum(row.own_s for row in batch) + further_s * further
    late_s = early_s = math.inf
    for row in batch:
        left_s = row.key[1] - view.now_s
        lacks_s = row.left * (cost.fixed_s + row.own_s) - left_s
        if lacks_s > 0:
            early_s = min(early_s, lacks_s - _ROUNDING)
        else:
            late_s = min(late_s, left_s - row.left * together_s - _ROUNDING)
    return StepDecision(ids, num_rounds, step_s=together_s, late_s=late_s, early_s=early_s)


def num_batches(view: StepView) -> int:
    """Return how many full batches the rows would fill."""
    return math.ceil(sum(view.share(row.request.size_px) for row in view.rows) - _ROUNDING)


def patience_of(batches: int) -> int:
    """Return for how many rounds a row may be left out of so many full batches."""
    return 2 * batches


def _candidate(row: RowView, view: StepView, patience: int) -> Candidate:
    request, waited = row.request, row.waited_rounds
    return Candidate(
        key=queue_key(request),
        left=request.remaining_steps,
        own_s=own_s(view.step_cost, request),
        size_px=request.size_px,
        share=view.share(request.size_px),
        overdue=waited if waited >= patience else 0,
    )
