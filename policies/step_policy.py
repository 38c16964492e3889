"""What a replica asks between two steps: which rows go next, for how long, and which never will.

The production answer is that of :mod:`ray_cluster.policies.step_batching`. Other answers stand in
:mod:`ray_cluster.policies.baselines`, to be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_cluster.policies.cost_model import step_s, work_of
from ray_cluster.policies.step_batching import choose_batch, rounds_unchanged
from ray_cluster.policies.types import RowView, StepCost


@dataclass(frozen=True, slots=True)
class ReplicaSight:
    """What there is to decide from.

    Attributes:
        rows: those that could step now.
        step_cost: seconds of a step, as the replica expects them.
        max_batch: most rows that it steps together.
        now_s: present instant on the clock of the deadlines.
    """

    rows: Sequence[RowView]
    step_cost: StepCost
    max_batch: int
    now_s: float

    def batch_s(self, request_ids: Sequence[str]) -> float:
        """Return the seconds that a step of these rows is expected to take."""
        chosen = set(request_ids)
        return step_s(
            self.step_cost,
            work_of(row.request for row in self.rows if row.request.request_id in chosen),
        )


@dataclass(frozen=True, slots=True)
class StepDecision:
    """What a replica does next.

    Attributes:
        request_ids: the rows that step together; none leaves the device idle until a row comes.
        num_rounds: steps for which this stays the answer if no row comes, goes or ends.
        dropped: rows that are given up.
        idle_until_s: without rows to step, the instant at which to ask again at the latest.
    """

    request_ids: tuple[str, ...] = ()
    num_rounds: int = 1
    dropped: tuple[str, ...] = ()
    idle_until_s: float | None = None


StepPolicy = Callable[[ReplicaSight], StepDecision]


def one_size_batches(sight: ReplicaSight) -> StepDecision:
    """Decide as engines do whose batches hold one size."""
    caps = {row.request.size_px: sight.max_batch for row in sight.rows}
    chosen = choose_batch(sight.rows, max_batch_by_size=caps, now_s=sight.now_s)
    if not chosen.request_ids:
        return StepDecision()
    num_rounds = rounds_unchanged(
        sight.rows,
        chosen,
        max_batch_by_size=caps,
        step_s=lambda: sight.batch_s(chosen.request_ids),
        now_s=sight.now_s,
    )
    return StepDecision(chosen.request_ids, num_rounds)
