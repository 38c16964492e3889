"""What a replica measures of its own work."""

from __future__ import annotations

from ray_cluster.engine.step_engine import StepReport
from ray_cluster.metrics.roles import ReplicaMetrics
from ray_cluster.metrics.snapshot import Snapshot
from ray_cluster.policies.cost_model import CostResidual, corrected, observe, step_s
from ray_cluster.policies.types import StepCost
from ray_cluster.replica_states import ReplicaStates


class ReplicaPace:
    """Corrects the cost of a step by observation, and counts what is done.

    Args:
        step_cost: as it was measured before the first request.
    """

    def __init__(self, step_cost: StepCost, model: str, replica_id: str) -> None:
        self._measured = step_cost
        self._residual = CostResidual()
        self._metrics = ReplicaMetrics(model, replica_id)

    @property
    def step_cost(self) -> StepCost:
        """What a step costs at present."""
        return corrected(self._measured, self._residual)

    def stepped(self, report: StepReport) -> None:
        """Take a step in; called in the step thread."""
        predicted_s = step_s(self._measured, report.work)
        self._residual = observe(
            self._residual, predicted_s=predicted_s, observed_s=report.duration_s
        )
        self._metrics.stepped(seconds=report.duration_s, num_images=len(report.stepped))

    def resumed(self, num_steps: int) -> None:
        """Take in that an image goes on from a state with so many steps."""
        self._metrics.resumed(num_steps)

    def exported(self, states: ReplicaStates, interval: int | None) -> None:
        """Take in what has been left in the state store, and every how many steps it is."""
        self._metrics.exported(total=states.writer.num_kept, interval=interval)

    def snapshot(self) -> Snapshot:
        """Return the metrics."""
        return self._metrics.snapshot()
