"""What comes to a simulated cluster: one request from its arrival to its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request on its way.

    Attributes:
        number: no other has it.
        confidence: that the light model's image will get.
        coin: in [0, 1), for routing at random.
        is_direct: whether it skips the light model of a cascade.
    """

    number: int
    service: str
    arrival_s: float
    deadline_s: float
    confidence: float
    coin: float
    is_direct: bool = False
