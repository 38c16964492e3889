"""What admission sees of the queue and the replicas: their own sums, and no copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ray_cluster.dispatch.ledger import Ledger
from ray_cluster.dispatch.progress import Progress
from ray_cluster.dispatch.replicas import Replicas
from ray_cluster.dispatch.state import RequestRecord
from ray_cluster.policies.admission import Line, predict_s
from ray_cluster.policies.load import Load, load_of
from ray_cluster.policies.pool import PoolView
from ray_cluster.policies.prediction_error import PredictionError
from ray_cluster.policies.types import RequestView


class QueueLook:
    """A look at the cell's books; a :class:`ray_cluster.policies.admission.QueueView`."""

    def __init__(
        self, ledger: Ledger, replicas: Replicas, *, max_waiting: int, configured: Collection[str]
    ) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self.max_waiting = max_waiting
        self.configured = configured

    @property
    def num_waiting(self) -> int:
        """Requests that wait, of all models."""
        return len(self._ledger.queue)

    @property
    def waiting_models(self) -> Sequence[str]:
        """Models of which requests wait."""
        return self._ledger.queue.models

    def pool(self, model: str) -> PoolView | None:
        """The model's live replicas, or the last that there was; None if there never was one."""
        return self._replicas.pool(model)

    def num_free(self, model: str) -> int:
        """Requests that the model's live replicas have room for."""
        return self._replicas.num_free(model)

    def waiting(self, model: str) -> Load:
        """What waits of a model."""
        return self._ledger.queue.load(model)

    def ahead_of(self, request: RequestView) -> Load:
        """What is in progress of the request's model, and what waits before it, without itself."""
        ahead = self._replicas.in_progress(request.model) + self._ledger.queue.load_before(request)
        record = self._ledger.get(request.request_id)
        if record is None or record.holder is None:
            return ahead
        return ahead - load_of(record.view)

    def allowance(self, model: str) -> float:
        """By what a prediction is to be multiplied so that it is probably kept."""
        return self._ledger.errors.get(model, PredictionError()).allowance

    def behind(self, request: RequestView) -> Line:
        """What waits of the request's model after it."""
        return Line(*self._ledger.queue.behind(request))

    def is_waiting(self, request: RequestView) -> bool:
        """Whether the request waits, and is not in progress."""
        return request.request_id in self._ledger.queue

    def progress(self, record: RequestRecord, *, predicts: bool) -> Progress:
        """Return how far a request is, and, if its model has replicas, when it will be done."""
        view, predicted_s = record.view, None
        if predicts and self.pool(view.model) is not None:
            predicted_s = predict_s([view], self)
        return Progress(
            position=self._ledger.queue.position(view) if record.holder is None else None,
            steps_done=view.steps_done,
            num_steps=view.num_steps,
            attempts=record.num_leases,
            predicted_s=predicted_s,
            preview=record.preview,
        )
