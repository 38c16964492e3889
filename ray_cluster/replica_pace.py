"""What a replica measures of its own work."""

from __future__ import annotations

from ray_cluster.engine.step_engine import StepReport
from ray_cluster.metrics.roles import ReplicaMetrics
from ray_cluster.metrics.snapshot import Snapshot
from ray_cluster.replica_states import ReplicaStates


class ReplicaPace:
    """Counts what is done."""

    def __init__(self, model: str, replica_id: str) -> None:
        self._metrics = ReplicaMetrics(model, replica_id)

    def stepped(self, report: StepReport) -> None:
        """Take a step in; called in the step thread."""
        self._metrics.stepped(
            seconds=report.duration_s,
            num_images=len(report.stepped),
            num_sizes=report.work.num_sizes,
            num_reused=report.num_reused,
        )

    def resumed(self, num_steps: int) -> None:
        """Take in that an image goes on from a state with so many steps."""
        self._metrics.resumed(num_steps)

    def exported(self, states: ReplicaStates, interval: int | None) -> None:
        """Take in what has been left in the state store, and every how many steps it is."""
        self._metrics.exported(total=states.writer.num_kept, interval=interval)

    def snapshot(self) -> Snapshot:
        """Return the metrics."""
        return self._metrics.snapshot()
