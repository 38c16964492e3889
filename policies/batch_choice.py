"""Which of several rows step together: the rule, on figures that are worked out beforehand.

The reasons stand in :mod:`ray_cluster.policies.mixed_batching`, which asks it for a real step;
:mod:`ray_cluster.policies.replica_course` asks it for those to come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from ray_cluster.policies.ordering import QueueKey
from ray_cluster.policies.types import StepCost

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

    @property
    def deadline_s(self) -> float:
        """Instant by which it should be done."""
        return self.key[1]


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
    # with less room than this nobody fits in
    least = min([row.share for row in ranked], default=0.0) - _ROUNDING
    batch: list[CandidateT] = []
    sizes: set[tuple[int, int]] = set()
    share, rows_s, most_s = 0.0, 0.0, math.inf
    for row in ranked:
        # the longest step with which it is in time; any, if it can't be
        bearable_s = (row.key[1] - now_s) / row.left
        if bearable_s < fixed_s + row.own_s or bearable_s > most_s:
            bearable_s = most_s
        if batch:
            if share + row.share > 1 + _ROUNDING:
                continue
            further = len(sizes) - (row.size_px in sizes)
            longer_s = fixed_s + rows_s + row.own_s + further_s * further
            if not row.overdue and longer_s > bearable_s:
                continue
        batch.append(row)
        sizes.add(row.size_px)
        share, rows_s, most_s = share + row.share, rows_s + row.own_s, bearable_s
        if share + least > 1:
            break
    return batch
