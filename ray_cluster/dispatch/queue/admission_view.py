"""The cell as admission sees it: sums that the ledger and the replicas keep, and no copies."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from ray_cluster.dispatch.queue.ledger import Ledger
from ray_cluster.dispatch.records import ReplicaRecord
from ray_cluster.dispatch.workers.replicas import Replicas
from ray_cluster.policies.admission.fluid import PoolView
from ray_cluster.policies.admission.forecast import (
    FEWEST_FORECASTS,
    MOST_REPLICAS,
    MOST_REQUESTS,
    ForecastView,
    forecasts_within_budget,
)
from ray_cluster.policies.admission.load import Load, load_of
from ray_cluster.policies.admission.queue_view import WaitingLoads
from ray_cluster.policies.admission.replica_simulation import ForecastReplica, Leased
from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.types import RequestView


class AdmissionView:
    """A :class:`ray_cluster.policies.admission.queue_view.QueueView`, which documents most methods.

    Attributes:
        lost: models that have had no replica for too long.
        asleep: models that a plan has stopped the last replica of.
        is_woken: whether a controller would start a replica of these for a request.
    """

    def __init__(self, ledger: Ledger, replicas: Replicas, configured: Collection[str]) -> None:
        self._ledger = ledger
        self._replicas = replicas
        self.configured = configured
        # of the settings, until these come
        self.max_waiting = 0
        self.max_waiting_s = math.inf
        self.has_preemption = False
        self.lost: frozenset[str] = frozenset()
        self.asleep: frozenset[str] = frozenset()
        self.is_woken = True
        # that are planned to have a replica again, and had none since
        self._rising: frozenset[str] = frozenset()

    @property
    def waiting_models(self) -> Sequence[str]:
        return self._ledger.queue.models

    def pool(self, model: str) -> PoolView | None:
        """As documented there; None as well for a model that nobody would wake."""
        is_lost = not self.is_woken and model in self.asleep and not self._replicas.ids(model)
        return None if is_lost or model in self.lost else self._replicas.pool(model)

    def note_asleep(self, models: Collection[str], *, is_woken: bool) -> None:
        """Know which models have no replica by a plan, and whether a controller would start one."""
        rising = {one for one in self._rising | self.asleep if not self._replicas.ids(one)}
        self.asleep, self.is_woken = frozenset(models), is_woken
        self._rising = frozenset(rising) - self.asleep

    def is_served(self, model: str) -> bool:
        """Whether a replica of a model lives, or a controller starts the first one."""
        if self._replicas.ids(model):
            return True
        return self._is_to_come(model) and self._replicas.pool(model) is not None

    def _is_to_come(self, model: str) -> bool:
        return self.is_woken and (model in self.asleep or model in self._rising)

    def note_lost(self, after_s: float, now_s: float) -> None:
        """Know which models have had no replica for so long, except those that a plan starts."""
        gone = self._replicas.gone_s.items()
        self.lost = frozenset(
            model
            for model, since_s in gone
            if now_s >= since_s + after_s and not self._is_to_come(model)
        )

    def next_lost_s(self, after_s: float) -> float:
        """Return when the next model that something waits for is lost; infinite if none is."""
        due_s = (
            since_s + after_s
            for model, since_s in self._replicas.gone_s.items()
            if self._ledger.queue.has(model) and not self._is_to_come(model)
            if model not in self.lost
        )
        return min(due_s, default=math.inf)

    def best_pool(self, model: str) -> PoolView | None:
        return self._replicas.best_pool(model)

    def num_free(self, model: str) -> int:
        return self._replicas.num_free(model)

    def waiting(self, model: str) -> Load:
        return self._ledger.queue.load(model)

    def ahead_of(self, request: RequestView) -> Load:
        in_progress = self._replicas.in_progress(request.model)
        ahead = in_progress.plus(self._ledger.queue.load_before(request))
        record = self._ledger.get(request.request_id)
        if record is None or record.holder is None:
            return ahead
        return ahead.minus(load_of(record.view))

    def safety_factor(self, model: str, now_s: float, *, is_simulated: bool) -> float:
        return self._ledger.stats.safety_factor(model, now_s, is_simulated=is_simulated)

    def forecast_view(self, group: Sequence[RequestView], now_s: float) -> ForecastView | None:
        model = group[0].model
        queue, ids = self._ledger.queue, self._replicas.ids(model)
        num_requests = queue.count(model) + self._replicas.in_progress(model).num_requests
        if not 0 < len(ids) <= MOST_REPLICAS or num_requests > MOST_REQUESTS:
            return None
        if self._is_too_much(group, num_requests):
            return None
        new = [one for one in group if not self._is_seen(one)]
        replicas = [self._replicas[one] for one in ids]
        # preempted requests wait as good as already
        preempted = [
            record.view
            for replica in replicas
            for record in replica.held.values()
            if record.is_preempted
        ]
        arrivals, stages = self._ledger.stats.arrivals(model), self._ledger.stats.stages(model)
        return ForecastView(
            now_s=now_s,
            replicas=[_forecast_replica(one, now_s, stages.encode_s) for one in replicas],
            queue=sorted([*queue.of_model(model)[:], *preempted, *new], key=queue_key),
            later=arrivals.recent,
            later_every_s=arrivals.interval_s(now_s),
            encode_s=stages.encode_s,
            rest_s=stages.rest_s,
        )

    def _is_too_much(self, group: Sequence[RequestView], num_requests: int) -> bool:
        """Whether a decision over a group would take too long if it simulated the cell."""
        model = group[0].model
        waiting, ids = self._ledger.queue.load(model), self._replicas.ids(model)
        needs_some = waiting.passes > 0 or any(one.needs for one in group)
        num_placed = waiting.num_requests + len(group) if needs_some else 0
        slots = [self._replicas[one].registration for one in ids]
        num = forecasts_within_budget(num_requests + len(group), num_placed, slots)
        return num < FEWEST_FORECASTS

    def _is_seen(self, view: RequestView) -> bool:
        """Whether it is in the queue or leased.

        One that waits for its add-ons, or of an earlier stage of a cascade, is not, yet.
        """
        record = self._ledger.get(view.request_id)
        if record is None or record.view.model != view.model:
            return False
        return record.holder is not None or view.request_id in self._ledger.queue

    def behind(self, request: RequestView) -> WaitingLoads:
        return WaitingLoads(*self._ledger.queue.behind(request))

    def is_waiting(self, request: RequestView) -> bool:
        return request.request_id in self._ledger.queue


def _forecast_replica(replica: ReplicaRecord, now_s: float, encode_s: float) -> ForecastReplica:
    held, leased = [], []
    for record in replica.held.values():
        if record.is_preempted:
            continue
        if record.leased_s + encode_s >= replica.reported_s:
            leased.append(Leased(record.view, record.leased_s - now_s))
        else:
            held.append(record.view)
    return ForecastReplica(
        cost=replica.step_cost,
        max_batch=replica.registration.max_batch,
        max_in_flight=replica.registration.max_in_flight,
        reported_s=min(0.0, replica.reported_s - now_s),
        held=held,
        leased=leased,
        residents=replica.view().residents,
        best_cost=replica.best_cost,
        group=replica.group,
        resumes=replica.registration.profile is None
        or replica.registration.profile.engine == "steps",
    )
