"""What admission sees of the queue and the replicas: their own sums, and no copies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ray_cluster.dispatch.ledger import Ledger
from ray_cluster.dispatch.replicas import Replicas
from ray_cluster.dispatch.state import ReplicaRecord, RequestRecord
from ray_cluster.policies.admission import predict_s
from ray_cluster.policies.forecast import ForecastView
from ray_cluster.policies.load import Load, load_of
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.pool import PoolView
from ray_cluster.policies.queue_view import Line
from ray_cluster.policies.replica_course import Leased, ReplicaScene
from ray_cluster.policies.types import RequestView
from ray_cluster.protocol.outcomes import Progress

# requests of a model, waiting and leased, that are followed for a prediction
MOST_FOLLOWED = 96
# replicas of it: every offer follows each of them, and among many a fluid is near enough
MOST_REPLICAS = 16


class AdmissionView:
    """A look at the cell's books; a :class:`ray_cluster.policies.queue_view.QueueView`."""

    def __init__(
        self,
        ledger: Ledger,
        replicas: Replicas,
        *,
        max_waiting: int,
        configured: Collection[str],
        has_preemption: bool,
    ) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self.max_waiting = max_waiting
        self.configured = configured
        self.has_preemption = has_preemption

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

    def allowance(self, model: str, *, is_followed: bool) -> float:
        """By what a prediction is to be multiplied so that it is probably kept."""
        return self._ledger.learnt.allowance(model, is_followed=is_followed)

    def scene(self, group: Sequence[RequestView], now_s: float) -> ForecastView | None:
        """All that is there of a group's model, itself included, if it is little enough."""
        model = group[0].model
        queue, ids = self._ledger.queue, self._replicas.ids(model)
        num_here = queue.count(model) + self._replicas.in_progress(model).num_requests
        if not 0 < len(ids) <= MOST_REPLICAS or num_here > MOST_FOLLOWED:
            return None
        new = [one for one in group if self._ledger.get(one.request_id) is None]
        replicas = [self._replicas[one] for one in ids]
        # those who give way wait as good as already
        leaving = [
            record.view
            for replica in replicas
            for record in replica.held.values()
            if record.gives_way
        ]
        inflow, stages = self._ledger.learnt.inflow(model), self._ledger.learnt.stages(model)
        return ForecastView(
            now_s=now_s,
            replicas=[_scene_of(one, now_s, stages.encode_s) for one in replicas],
            line=sorted([*queue.line(model)[:], *leaving, *new], key=queue_key),
            later=inflow.recent,
            later_every_s=inflow.every_s(now_s),
            encode_s=stages.encode_s,
            rest_s=stages.rest_s,
        )

    def behind(self, request: RequestView) -> Line:
        """What waits of the request's model after it."""
        return Line(*self._ledger.queue.behind(request))

    def is_waiting(self, request: RequestView) -> bool:
        """Whether the request waits, and is not in progress."""
        return request.request_id in self._ledger.queue

    def progress(self, record: RequestRecord, now_s: float, *, predicts: bool) -> Progress:
        """Return how far a request is, and, if its model has replicas, when it will be done."""
        view, predicted_s = record.view, None
        if predicts and self.pool(view.model) is not None:
            predicted_s = predict_s([view], self, now_s)
        return Progress(
            position=self._ledger.queue.position(view) if record.holder is None else None,
            steps_done=view.steps_done,
            num_steps=view.num_steps,
            attempts=record.num_leases,
            predicted_s=predicted_s,
            preview=record.preview,
        )


def _scene_of(replica: ReplicaRecord, now_s: float, encode_s: float) -> ReplicaScene:
    held, leased = [], []
    for record in replica.held.values():
        if record.gives_way:
            continue
        if record.leased_s + encode_s >= replica.told_s:
            leased.append(Leased(record.view, record.leased_s - now_s))
        else:
            held.append(record.view)
    return ReplicaScene(
        cost=replica.step_cost,
        max_batch=replica.registration.max_batch,
        max_in_flight=replica.registration.max_in_flight,
        told_s=min(0.0, replica.told_s - now_s),
        held=held,
        leased=leased,
        residents=replica.view().residents,
    )
