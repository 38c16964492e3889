"""What admission sees of a cell and of a client."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from ray_cluster.policies.forecast import ForecastView
from ray_cluster.policies.load import Amounts, Floats, Load
from ray_cluster.policies.pool import PoolView
from ray_cluster.policies.types import RequestView


@dataclass(frozen=True, slots=True)
class Line:
    """Waiting requests in the queue's order.

    Attributes:
        amounts: what each of them takes, [L, N].
        deadlines_s: instants, [N].
    """

    amounts: Amounts
    deadlines_s: Floats


class QueueView(Protocol):
    """What admission may know of the cell.

    A look at sums that the owner of the queue keeps, and no copy: a decision may not take as long
    as the queue is.
    """

    @property
    def max_waiting(self) -> int:
        """Most requests that may wait, over all models."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait, of all models."""

    @property
    def has_preemption(self) -> bool:
        """Whether requests that are leased may give way to others."""

    @property
    def configured(self) -> Collection[str]:
        """Models that may still come up."""

    @property
    def waiting_models(self) -> Sequence[str]:
        """Models of which requests wait."""

    def pool(self, model: str) -> PoolView | None:
        """The model's live replicas, or the last that there was; None if there never was one."""

    def num_free(self, model: str) -> int:
        """Requests that the model's live replicas have room for."""

    def waiting(self, model: str) -> Load:
        """What waits of a model."""

    def ahead_of(self, request: RequestView) -> Load:
        """What is in progress of the request's model, and what waits before it, without itself."""

    def allowance(self, model: str, *, is_followed: bool) -> float:
        """By what a prediction is to be multiplied so that it is probably kept.

        Args:
            model: whose requests.
            is_followed: whether all that is there is followed for it; else it flows.
        """

    def behind(self, request: RequestView) -> Line:
        """What waits of the request's model after it."""

    def scene(self, group: Sequence[RequestView], now_s: float) -> ForecastView | None:
        """One replica that may get a group, or has it, with all that is there of it in the line.

        None where too much waits before it for all that to be followed, or nobody lives.
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
