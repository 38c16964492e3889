"""What the dispatcher has at one instant, for status pages and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ray_cluster.dispatch.ledger import Ledger
from ray_cluster.dispatch.state import ReplicaRecord
from ray_cluster.dispatch.statistics import Ratios
from ray_cluster.policies.types import StepCost


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One live replica as a status page shows it.

    Attributes:
        silent_s: seconds since its last sign of life.
        leased_work_s: replica seconds that what it holds still takes in full batches.
    """

    replica_id: str
    model: str
    num_leased: int
    num_free: int
    max_in_flight: int
    max_batch: int
    silent_s: float
    leased_work_s: float
    step_cost: StepCost

    @staticmethod
    def of(record: ReplicaRecord, now_s: float) -> ReplicaSnapshot:
        view = record.view()
        return ReplicaSnapshot(
            replica_id=view.replica_id,
            model=view.model,
            num_leased=view.num_leased,
            num_free=view.room,
            max_in_flight=view.max_in_flight,
            max_batch=view.max_batch,
            silent_s=now_s - record.heard_s,
            leased_work_s=view.leased_work_s,
            step_cost=view.step_cost,
        )


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The dispatcher's state at one instant, for status pages and metrics.

    Attributes:
        num_waiting_by_model: every known model, also those with nothing waiting.
        oldest_waiting_s: seconds the longest-waiting request has been in the system; 0 if none.
        totals: events since the dispatcher started, by name: accepted, refused, completed,
            missed (completed after their deadline), error, aborted, lost, requeued, preempted.
        met: images that ended by their deadlines, by model and size class.
        missed: those that ended later or not at all, likewise.
        made: images made, by model and the fidelity that they got.
        ratios: real over predicted seconds, by model.
        refused: images by model and reason.
    """

    epoch: int
    num_waiting: int
    max_waiting: int
    num_leased: int
    oldest_waiting_s: float
    num_waiting_by_model: Mapping[str, int]
    replicas: tuple[ReplicaSnapshot, ...]
    totals: Mapping[str, int]
    met: Mapping[tuple[str, str], int]
    missed: Mapping[tuple[str, str], int]
    made: Mapping[tuple[str, str], int]
    ratios: Mapping[str, Ratios]
    refused: Mapping[tuple[str, str], int]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know: models that no live replica has."""
        alive = {replica.model for replica in self.replicas}
        return tuple(
            f"no replica of {model} lives; {count} images wait for one"
            for model, count in self.num_waiting_by_model.items()
            if model not in alive
        )

    @staticmethod
    def of(
        ledger: Ledger,
        replicas: Iterable[ReplicaRecord],
        *,
        epoch: int,
        max_waiting: int,
        models: Iterable[str],
        now_s: float,
    ) -> ClusterSnapshot:
        waiting, counters = tuple(ledger.queue), ledger.counters
        return ClusterSnapshot(
            epoch=epoch,
            num_waiting=len(waiting),
            max_waiting=max_waiting,
            num_leased=len(ledger) - len(waiting),
            oldest_waiting_s=max((now_s - view.arrival_s for view in waiting), default=0.0),
            num_waiting_by_model={model: ledger.queue.count(model) for model in sorted(models)},
            replicas=tuple(ReplicaSnapshot.of(one, now_s) for one in replicas),
            totals=dict(counters.totals),
            met=dict(counters.met),
            missed=dict(counters.missed),
            made=dict(counters.made),
            ratios=dict(counters.ratios),
            refused=dict(counters.refused),
        )
