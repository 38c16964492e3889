"""What admission sees of a cell and of a client."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ray_cluster.policies.admission.fluid import PoolView
from ray_cluster.policies.admission.forecast import ForecastView
from ray_cluster.policies.admission.load import Amounts, Floats, Load
from ray_cluster.policies.types import RequestView


@dataclass(frozen=True, slots=True)
class WaitingLoads:
    """Waiting requests in the queue's order.

    Attributes:
        amounts: what each of them takes, [L, N].
        deadlines_s: instants, [N].
    """

    amounts: Amounts
    deadlines_s: Floats


class QueueView(Protocol):
    """What admission may know of the cell: sums that the queue's owner keeps, and no copies.

    So a decision does not take longer where the queue is longer.
    """

    @property
    def max_waiting(self) -> int:
        """Most requests that may wait for one model."""

    @property
    def max_waiting_s(self) -> float:
        """Most seconds that a model's replicas may need for what waits for it."""

    @property
    def has_preemption(self) -> bool:
        """Whether leased requests may be preempted."""

    @property
    def configured(self) -> Collection[str]:
        """Models that may still come up."""

    def pool(self, model: str) -> PoolView | None:
        """The model's live replicas, or the last that there was.

        None if there never was one, or there has been none for too long.
        """

    def best_pool(self, model: str) -> PoolView | None:
        """The same, each replica live and as fast as the fastest is or was at its start."""

    def num_free(self, model: str) -> int:
        """Free slots of the model's live replicas."""

    def waiting(self, model: str) -> Load:
        """Load of a model's waiting requests."""

    def ahead_of(self, request: RequestView) -> Load:
        """Load in progress of the request's model, and waiting before it, without itself."""

    def safety_factor(self, model: str, now_s: float, *, is_simulated: bool) -> float:
        """Factor for a predicted latency so that it probably holds, by how it is predicted."""

    def behind(self, request: RequestView) -> WaitingLoads:
        """What waits of the request's model after it."""

    def forecast_view(self, group: Sequence[RequestView], now_s: float) -> ForecastView | None:
        """The replicas and the queue of a group's model, with the group in the queue.

        None if that is too much to simulate, or no replica lives.
        """

    def is_waiting(self, request: RequestView) -> bool:
        """Whether the request waits, and is not in progress."""


@dataclass(frozen=True, slots=True)
class ClientView:
    """What admission may know of the client that a group is for.

    Attributes:
        in_flight: its requests that have not ended, waiting or leased.
        max_in_flight: most that it may have.
    """

    in_flight: Sequence[RequestView]
    max_in_flight: int
