"""What became of the arrivals at a simulated cell.

Refused, dropped, failed and late requests all count as missed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ray_cluster.simulator.workload import Arrival

End = Literal["finished", "refused", "failed"]


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of an arrival.

    Attributes:
        end_s: instant at which that was clear.
        num_steps: with how many it was made.
        attempts: leases it took.
        predicted_s: seconds from the arrival until then, as they were predicted when it was let in.
    """

    arrival: Arrival
    end: End
    end_s: float
    num_steps: int = 0
    attempts: int = 0
    predicted_s: float = 0.0

    @property
    def is_met(self) -> bool:
        """Whether it was finished in time, with no fewer steps than its client puts up with."""
        arrival = self.arrival
        is_whole = self.num_steps >= (arrival.fewest_steps or arrival.num_steps)
        in_time = self.end_s <= arrival.arrival_s + arrival.slo_s
        return self.end == "finished" and is_whole and in_time


@dataclass(slots=True)
class CellResult:
    """How a simulation went.

    Attributes:
        fates: one per arrival, in the workload's order.
        busy_s_by_replica: seconds in which each device worked.
        end_s: instant at which the last of them ended.
        num_events: what the virtual clock went through.
    """

    fates: list[Fate]
    busy_s_by_replica: dict[str, float]
    end_s: float
    num_events: int
    totals: Counter[End]

    @property
    def attainment(self) -> float:
        """Share of all arrivals that were finished in time; 1 if there were none."""
        return attainment(self.fates)

    def attainment_by_class(self) -> dict[str, float]:
        """The same within each service class."""
        classes = sorted({fate.arrival.slo_class for fate in self.fates})
        return {
            name: attainment([fate for fate in self.fates if fate.arrival.slo_class == name])
            for name in classes
        }


def attainment(fates: Sequence[Fate]) -> float:
    """Return the share of arrivals that were finished in time; 1 if there were none."""
    return sum(fate.is_met for fate in fates) / len(fates) if fates else 1.0
