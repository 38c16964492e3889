"""Which rows step together on a replica whose batches hold one size, as today's engines' do.

The most urgent row's size goes next, and urgency is the queue's order, so that requests are
finished one after the other rather than all late. Rows that were passed over for too long come
first, which bounds every row's wait:

    A row steps at least once in any ``3 * num_batches`` rounds, where ``num_batches`` is the
    largest number of batches, over those rounds, that stepping every row once would take.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from ray_cluster.policies.leasing.ordering import Urgency, urgency
from ray_cluster.policies.steps.step_policy import StepDecision, StepView
from ray_cluster.policies.types import RowView

_ROUNDING = 1e-9


def one_size_batches(view: StepView) -> StepDecision:
    """Decide for the rows; the same rows give the same answer in whatever order."""
    if not view.rows:
        return StepDecision()
    patience = 2 * num_batches(view)

    def rank(row: RowView) -> tuple[int, Urgency]:
        overdue = row.waited_rounds if row.waited_rounds >= patience else 0
        return (-overdue, urgency(row.request, view.now_s))

    ranked = sorted(view.rows, key=rank)
    size = ranked[0].request.size_px
    alike = [row for row in ranked if row.request.size_px == size]
    chosen = alike[: view.most_of(size)]
    # ranks change when a deadline passes
    passes_s = min(
        (one.request.deadline_s for one in view.rows if one.request.deadline_s >= view.now_s),
        default=math.inf,
    )
    everybody = len(chosen) == len(view.rows)
    return StepDecision(
        tuple(row.request.request_id for row in chosen),
        _rounds_unchanged(view, chosen, patience),
        late_s=math.inf if everybody else passes_s - view.now_s - _ROUNDING,
    )


def num_batches(view: StepView) -> int:
    """Return how many batches it takes to step every row once."""
    num_by_size = Counter(row.request.size_px for row in view.rows)
    return sum(-(-num // view.most_of(size)) for size, num in num_by_size.items())


def _rounds_unchanged(view: StepView, chosen: Sequence[RowView], patience: int) -> int:
    """Return for how many rounds a batch stays the answer if no row comes and no deadline passes.

    It is at least 1, and no more than what ends the batch's first row.
    """
    ends = min(row.request.remaining_steps for row in chosen)
    if len(chosen) == len(view.rows):
        return ends
    if any(row.waited_rounds >= patience for row in view.rows):
        return 1
    ids = {row.request.request_id for row in chosen}
    others = [row for row in view.rows if row.request.request_id not in ids]
    overdue = min(patience - row.waited_rounds for row in others)
    return min(ends, overdue)
