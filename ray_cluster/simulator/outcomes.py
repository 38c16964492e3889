"""What became of the requests of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Answer = Literal["light", "heavy", "dropped"]


class SimulatedOutcome(NamedTuple):
    """One request that has ended.

    Attributes:
        answer: which model's image it got; for a service without cascade ``light`` stands for its
            only model.
        kept: whether it was below the threshold and got the light answer all the same, for want of
            time.
        on_time: false if it was late or dropped.
    """

    service: str
    arrival_s: float
    finish_s: float
    answer: Answer
    on_time: bool
    kept: bool = False


@dataclass(frozen=True, slots=True)
class Faults:
    """How often GPUs fail.

    Attributes:
        mean_s_between: of one GPU that is held; exponentially distributed. Infinite for never.
        repair_s: for which it is of no use.
        are_silent: whether the replica is just gone, as with its machine, and found out by its
            silence; else it signs off at once, as one does whose engine has died.
    """

    mean_s_between: float
    repair_s: float
    are_silent: bool = True
