"""Which rows step together on a replica whose batches may mix sizes.

Every row that joins makes the step longer for all, and the device do more per second. So rows join
in the order of their urgency for as long as nobody in the batch who can still be in time would be
late because of it. (PatchedServe, section 5.2, stops at a running request that would be late, too;
its gain in throughput, equation 1, is a harmonic ratio that falls as batching helps, and is not
used: with a fixed cost per step every further row gains.) Rows that were left out for too long come
first whatever that costs the others, which bounds every row's wait:

    A row steps at least once in any ``4 * num_batches + 1`` rounds, where ``num_batches`` is the
    largest number of full batches, over those rounds, that all rows would fill.
"""

from __future__ import annotations

import math

from ray_cluster.policies.batch_choice import Candidate, choose_batch
from ray_cluster.policies.cost_model import own_s
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.step_policy import ReplicaSight, StepDecision
from ray_cluster.policies.types import RowView

_ROUNDING = 1e-9


def mixed_batches(sight: ReplicaSight) -> StepDecision:
    """Decide as engines may whose batches mix sizes; the rows' order does not matter."""
    if not sight.rows:
        return StepDecision()
    patience = patience_of(num_batches(sight))
    candidates = [_candidate(row, sight, patience) for row in sight.rows]
    batch = choose_batch(candidates, sight.step_cost, sight.now_s)
    everybody = len(batch) == len(sight.rows)
    # who is left out may fit in after a step
    num_rounds = int(min(row.left for row in batch)) if everybody else 1
    return StepDecision(tuple(row.key[-1] for row in batch), num_rounds)


def num_batches(sight: ReplicaSight) -> int:
    """Return how many full batches the rows would fill."""
    return math.ceil(sum(sight.share(row.request.size_px) for row in sight.rows) - _ROUNDING)


def patience_of(batches: int) -> int:
    """Return for how many rounds a row may be left out of so many full batches."""
    return 2 * batches


def _candidate(row: RowView, sight: ReplicaSight, patience: int) -> Candidate:
    request, waited = row.request, row.waited_rounds
    return Candidate(
        key=queue_key(request),
        left=request.remaining_steps,
        own_s=own_s(sight.step_cost, request),
        size_px=request.size_px,
        share=sight.share(request.size_px),
        overdue=waited if waited >= patience else 0,
    )
