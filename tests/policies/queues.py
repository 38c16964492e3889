"""A cell's queue as plain lists, looked through anew for every question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ray_cluster.policies.admission.fluid import PoolView, pool_of
from ray_cluster.policies.admission.forecast import ForecastView
from ray_cluster.policies.admission.load import (
    NO_LOAD,
    NUM_AMOUNTS,
    Load,
    amounts_of,
    load_of,
    total_load,
)
from ray_cluster.policies.admission.queue_view import WaitingLoads
from ray_cluster.policies.admission.replica_simulation import ForecastReplica
from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.leasing.routing import ReplicaTable, shared_prices
from ray_cluster.policies.types import ReplicaView, RequestView
from tests.fakes import replica_view, request_view

# of one replica that runs batches of two: 10 steps of 2.1 s are 21 s for both
SHARE_S, BATCH_S = 10.5, 21.0


@dataclass(frozen=True)
class ListQueue:
    """What admission asks for, by brute force."""

    waits: Sequence[RequestView] = ()
    in_progress: Sequence[RequestView] = ()
    replicas: Sequence[ReplicaView] = ()
    max_waiting: int = 100
    max_waiting_s: float = math.inf
    configured: Sequence[str] = ()
    stretch: float = 1.0
    is_simulated: bool = False
    has_preemption: bool = False

    def pool(self, model: str) -> PoolView | None:
        mine = [one for one in self.replicas if one.model == model]
        return pool_of(mine) if mine else None

    def best_pool(self, model: str) -> PoolView | None:
        return self.pool(model)

    def num_free(self, model: str) -> int:
        return sum(one.room for one in self.replicas if one.model == model)

    def waiting(self, model: str) -> Load:
        return total_load(one for one in self.waits if one.model == model)

    def ahead_of(self, request: RequestView) -> Load:
        key, own = queue_key(request), request.request_id
        running = [one for one in self.in_progress if one.request_id != own]
        before = [one for one in self.waits if queue_key(one) < key]
        return total_load(one for one in (*running, *before) if one.model == request.model)

    def safety_factor(self, model: str, now_s: float, *, is_simulated: bool) -> float:
        return self.stretch

    def behind(self, request: RequestView) -> WaitingLoads:
        key = queue_key(request)
        after = sorted(
            (one for one in self.waits if one.model == request.model and queue_key(one) > key),
            key=queue_key,
        )
        amounts = [amounts_of(load_of(one)) for one in after]
        return WaitingLoads(
            np.array(amounts).reshape(len(after), len(amounts_of(NO_LOAD))).T,
            np.array([one.deadline_s for one in after]),
        )

    def forecast_view(self, group: Sequence[RequestView], now_s: float) -> ForecastView | None:
        """None unless it is asked for: the fluid predicts."""
        if not self.is_simulated:
            return None
        own = {one.request_id for one in group}
        here = [one for one in self.waits if one.request_id not in own]
        return ForecastView(
            now_s,
            [
                ForecastReplica(
                    one.step_cost, one.max_batch, one.max_in_flight, held=self.in_progress
                )
                for one in self.replicas
            ],
            queue=sorted([*here, *group], key=queue_key),
        )

    def is_waiting(self, request: RequestView) -> bool:
        return any(one.request_id == request.request_id for one in self.waits)


def queue_of(
    num_waiting: int = 0,
    num_in_progress: int = 0,
    replicas: tuple[ReplicaView, ...] = (replica_view(num_free=0),),
    max_waiting: int = 8,
) -> ListQueue:
    return ListQueue(
        waits=[request_view(f"w{index}", arrival_s=-1.0) for index in range(num_waiting)],
        in_progress=[request_view(f"p{index}") for index in range(num_in_progress)],
        replicas=replicas,
        max_waiting=max_waiting,
        configured=("m", "cold"),
    )


def table_of(views: Sequence[ReplicaView]) -> ReplicaTable:
    """Return the table of replicas, all of which can be counted on."""
    return ReplicaTable(
        np.array([one.leased_work_s for one in views], dtype=float),
        np.array([one.room for one in views], dtype=np.int64),
        np.array([shared_prices(one) for one in views]).reshape(len(views), NUM_AMOUNTS),
    )
