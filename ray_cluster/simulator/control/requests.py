"""Requests to a simulated cluster, and how they end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Answer = Literal["light", "heavy", "dropped"]


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request.

    Attributes:
        number: unique in a run.
        confidence: that the light model's image will get.
        coin: in [0, 1), for random routing.
    """

    number: int
    service: str
    arrival_s: float
    deadline_s: float
    confidence: float
    coin: float


class SimulatedOutcome(NamedTuple):
    """One request that has ended.

    Attributes:
        answer: whose image it got; of a service without a cascade, ``light`` is its only model.
        kept: whether it got the light answer for want of time, with a confidence below the
            threshold.
        on_time: false if it was late or dropped.
    """

    service: str
    arrival_s: float
    finish_s: float
    answer: Answer
    on_time: bool
    kept: bool = False
