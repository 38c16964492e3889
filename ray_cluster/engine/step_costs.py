"""What a step costs on this device: measured once, learnt from every step that is taken."""

from __future__ import annotations

from ray_cluster.policies.cost_learning import StepHistory, credible_s, learnt_cost, remember
from ray_cluster.policies.cost_model import (
    CostResidual,
    StepWork,
    TimedStep,
    corrected,
    observe,
    step_s,
)
from ray_cluster.policies.types import StepCost

# of no model in particular: who has deadlines to keep measures first
_UNMEASURED = StepCost(fixed_s=0.01, per_megapixel_s=1.0, source="modelled")
# steps after which the terms are worked out anew; how fast all goes is followed at each
_EVERY = 4


class StepCosts:
    """Follows the cost of a step. The step thread observes; any thread may read.

    Args:
        measured: as it was found before the first request.
    """

    def __init__(self, measured: StepCost = _UNMEASURED) -> None:
        self._measured = self._learnt = measured
        self._history = StepHistory()
        self._residual = CostResidual()
        self._num_learnt = 0
        self._last: tuple[StepWork, int] | None = None

    @property
    def current(self) -> StepCost:
        """What a step costs at present."""
        return corrected(self._learnt, self._residual)

    def observe(self, work: StepWork, duration_s: float, *, num_calls: int = 1) -> None:
        """Take in a step that was taken, in so many calls of the model.

        Terms are learnt from steps after one of the same work alone. In the first of a batch are
        the kernels and indices that are made once for its shapes, and whoever joins beside it.
        """
        self._residual = observe(
            self._residual, predicted_s=step_s(self._learnt, work), observed_s=duration_s
        )
        is_like_last, self._last = self._last == (work, num_calls), (work, num_calls)
        if not is_like_last:
            return
        step = TimedStep(work, credible_s(duration_s, step_s(self.current, work)))
        self._history = remember(self._history, step, num_calls=num_calls)
        self._num_learnt += 1
        if self._num_learnt % _EVERY == 0:
            self._learnt = learnt_cost(self._measured, self._history)
