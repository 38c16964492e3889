"""Which rows step together on a replica whose batches may mix sizes.

Every row that joins makes the step longer for all, and the device do more per second. So rows join
in the order of their urgency for as long as nobody in the batch who can still be in time would be
late because of it. (PatchedServe, section 5.2, stops at a running request that would be late, too;
its gain in throughput, equation 1, is a harmonic ratio that falls as batching helps, and is not
used: with a fixed cost per step every further row gains.)
"""

from __future__ import annotations

from ray_cluster.policies.cost_model import (
    StepWork,
    row_megapixels,
    row_squared_megapixels,
    step_s,
)
from ray_cluster.policies.step_batching import urgency
from ray_cluster.policies.step_policy import ReplicaSight, StepDecision
from ray_cluster.policies.types import RequestView


def mixed_batches(sight: ReplicaSight) -> StepDecision:
    """Decide as engines may whose batches mix sizes; the rows' order does not matter."""
    if not sight.rows:
        return StepDecision()
    requests = sorted((row.request for row in sight.rows), key=lambda one: _rank(one, sight))
    batch = _Batch(sight)
    for request in requests:
        if len(batch.requests) == sight.max_batch:
            break
        if not batch.requests or batch.allows(request):
            batch.add(request)
    everybody = len(batch.requests) == len(requests)
    # who is left out may fit in after a step
    num_rounds = min(one.remaining_steps for one in batch.requests) if everybody else 1
    return StepDecision(tuple(one.request_id for one in batch.requests), num_rounds)


def _rank(request: RequestView, sight: ReplicaSight) -> tuple[bool, object]:
    """Those that can't be in time any more come last, whatever their deadline was."""
    alone_s = request.remaining_steps * _alone_s(request, sight)
    hopeless = sight.now_s + alone_s > request.deadline_s
    return (hopeless, urgency(request, sight.now_s))


def _alone_s(request: RequestView, sight: ReplicaSight) -> float:
    work = StepWork(row_megapixels(request), row_squared_megapixels(request))
    return step_s(sight.step_cost, work)


class _Batch:
    """A batch that grows, with the longest step that nobody in it minds."""

    def __init__(self, sight: ReplicaSight) -> None:
        self._sight = sight
        self._work = StepWork(0.0, 0.0, 0)
        self._sizes: set[tuple[int, int]] = set()
        self._most_s = float("inf")
        self.requests: list[RequestView] = []

    def allows(self, request: RequestView) -> bool:
        """Whether all that can be in time still are if the request joins, itself included."""
        longer_s = step_s(self._sight.step_cost, self._with(request))
        return longer_s <= min(self._most_s, self._bearable_s(request))

    def add(self, request: RequestView) -> None:
        self._work = self._with(request)
        self._sizes.add(request.size_px)
        self._most_s = min(self._most_s, self._bearable_s(request))
        self.requests.append(request)

    def _with(self, request: RequestView) -> StepWork:
        return StepWork(
            self._work.megapixels + row_megapixels(request),
            self._work.squared_megapixels + row_squared_megapixels(request),
            len(self._sizes | {request.size_px}),
        )

    def _bearable_s(self, request: RequestView) -> float:
        """The longest step with which a request is in time; any, if it can't be."""
        left_s = request.deadline_s - self._sight.now_s
        bearable_s = left_s / request.remaining_steps
        if bearable_s < _alone_s(request, self._sight):
            return float("inf")
        return bearable_s
