"""Which rows of a replica take the next denoising step together.

A batch holds rows of one size. The most urgent row's size goes next, and urgency is the queue's
order, so that requests are finished one after the other rather than all late. Rows that were
passed over for too long come first, which bounds every row's wait:

    A row steps at least once in any ``3 * num_batches`` rounds, where ``num_batches`` is the
    largest number of batches, over those rounds, that stepping every row once would take.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from ray_cluster.policies.ordering import QueueKey, queue_key
from ray_cluster.policies.types import BatchDecision, RequestView, RowView

SizePx = tuple[int, int]
Urgency = tuple[int, bool, QueueKey]


def choose_batch(
    rows: Sequence[RowView], *, max_batch_by_size: Mapping[SizePx, int], now_s: float
) -> BatchDecision:
    """Return the rows of the next step; the same rows give the same answer in whatever order.

    Args:
        rows: all rows that could step now.
        max_batch_by_size: most rows in one batch of that size; an entry below 1 counts as 1.
        now_s: present instant on the clock of the deadlines.
    """
    if not rows:
        return BatchDecision(size_px=None)
    if len(rows) == 1:
        only = rows[0].request
        return BatchDecision(only.size_px, (only.request_id,))
    limit = {size: max(1, max_batch_by_size[size]) for size in {r.request.size_px for r in rows}}
    patience = 2 * num_batches(rows, limit)

    def rank(row: RowView) -> tuple[int, Urgency]:
        overdue = row.waited_rounds if row.waited_rounds >= patience else 0
        return (-overdue, urgency(row.request, now_s))

    ranked = sorted(rows, key=rank)
    size = ranked[0].request.size_px
    alike = [row.request.request_id for row in ranked if row.request.size_px == size]
    return BatchDecision(size_px=size, request_ids=tuple(alike[: limit[size]]))


def num_batches(rows: Sequence[RowView], max_batch_by_size: Mapping[SizePx, int]) -> int:
    """Return how many batches it takes to step every row once."""
    num_by_size: dict[SizePx, int] = defaultdict(int)
    for row in rows:
        num_by_size[row.request.size_px] += 1
    return sum(-(-num // max_batch_by_size[size]) for size, num in num_by_size.items())


def urgency(request: RequestView, now_s: float) -> Urgency:
    """Return the sort key: priority, then what can still be in time, then the queue's order.

    A row past its deadline must not make others late as well.
    """
    return (-request.priority, request.deadline_s < now_s, queue_key(request))


def rounds_unchanged(
    rows: Sequence[RowView],
    decision: BatchDecision,
    *,
    max_batch_by_size: Mapping[SizePx, int],
    step_s: Callable[[], float],
    now_s: float,
) -> int:
    """Return for how many rounds a decision surely stays the answer, as long as no row comes.

    It is at least 1, and no more than what ends the batch's first row. A simulator takes so many
    steps at once.

    Args:
        rows: what :func:`choose_batch` chose from.
        decision: what it chose; not none.
        max_batch_by_size: as it was told.
        step_s: tells the seconds of one round, if they matter.
        now_s: instant of the decision.
    """
    if len(decision.request_ids) == len(rows):
        return min(row.request.remaining_steps for row in rows)
    chosen = set(decision.request_ids)
    ends = min(row.request.remaining_steps for row in rows if row.request.request_id in chosen)
    others = [row for row in rows if row.request.request_id not in chosen]
    patience = 2 * num_batches(
        rows, {size: max(1, most) for size, most in max_batch_by_size.items()}
    )
    if any(row.waited_rounds >= patience for row in rows):
        return 1
    overdue = min(patience - row.waited_rounds for row in others)
    # ranks change when a deadline passes
    each_s = step_s()
    passes = min(
        (
            max(1, math.floor((row.request.deadline_s - now_s) / each_s))
            for row in rows
            if now_s <= row.request.deadline_s < now_s + ends * each_s
        ),
        default=ends,
    )
    return min(ends, overdue, passes)
