"""What a step costs on this device: measured once, corrected by every step that is taken."""

from __future__ import annotations

from ray_cluster.policies.cost_model import CostResidual, StepWork, corrected, observe, step_s
from ray_cluster.policies.types import StepCost

# of no model in particular: who has deadlines to keep measures first
_UNMEASURED = StepCost(fixed_s=0.01, per_megapixel_s=1.0, source="modelled")


class StepCosts:
    """Follows the cost of a step. The step thread observes; any thread may read.

    Args:
        measured: as it was found before the first request.
    """

    def __init__(self, measured: StepCost = _UNMEASURED) -> None:
        self._measured = measured
        self._residual = CostResidual()

    @property
    def current(self) -> StepCost:
        """What a step costs at present."""
        return corrected(self._measured, self._residual)

    def observe(self, work: StepWork, duration_s: float) -> None:
        """Take in a step that was taken."""
        self._residual = observe(
            self._residual, predicted_s=step_s(self._measured, work), observed_s=duration_s
        )
