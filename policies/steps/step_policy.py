"""What a replica asks between two steps: which rows go next, for how long, and which are dropped.

The production answer is :mod:`ray_cluster.policies.steps.mixed_batching`; its rivals are in
:mod:`ray_cluster.policies.baselines`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray_cluster.policies.types import RowView, StepCost


@dataclass(frozen=True, slots=True)
class StepView:
    """What there is to decide from.

    Attributes:
        rows: those that could step now.
        step_cost: expected seconds of a step.
        max_batch: most rows that it steps together.
        now_s: present instant on the clock of the deadlines.
        max_batch_by_size: most rows of one size that memory allows; None for no such bound.
    """

    rows: Sequence[RowView]
    step_cost: StepCost
    max_batch: int
    now_s: float
    max_batch_by_size: Mapping[tuple[int, int], int] | None = None

    def most_of(self, size_px: tuple[int, int]) -> int:
        """Return how many rows of a size it steps together, at least 1."""
        if self.max_batch_by_size is None:
            return self.max_batch
        return max(1, min(self.max_batch, self.max_batch_by_size[size_px]))

    def share(self, size_px: tuple[int, int]) -> float:
        """Return which part of a full batch a row of that size is."""
        return 1 / self.most_of(size_px)


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What a replica does next.

    Attributes:
        request_ids: the rows that step together; none leaves the device idle until a row comes.
        num_rounds: steps for which this holds if no row comes, goes or ends; see :meth:`num_held`.
        dropped: rows that are given up.
        idle_until_s: without rows to step, the latest instant of the next decision.
        step_s, late_s, early_s: it holds after a step that ends at most `late_s` later, and less
            than `early_s` earlier, than if each had taken `step_s`.
    """

    request_ids: tuple[str, ...] = ()
    num_rounds: int = 1
    dropped: tuple[str, ...] = ()
    idle_until_s: float | None = None
    step_s: float = 0.0
    late_s: float = math.inf
    early_s: float = math.inf

    def num_held(self, start_s: float, ends_s: Sequence[float]) -> int:
        """Return how many of the steps that end then are taken before the next decision."""
        if self.late_s < math.inf or self.early_s < math.inf:
            due_s = start_s
            for number, end_s in enumerate(ends_s, 1):
                due_s += self.step_s
                if not -self.early_s < end_s - due_s <= self.late_s:
                    return number
        return len(ends_s)


StepPolicy = Callable[[StepView], StepDecision]
