"""What has been let in of late, from which to tell what comes next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.types import RequestView

# requests that are remembered
WINDOW = 32
# fewer than these say nothing of a rate
_FEWEST = 8


@dataclass(frozen=True, slots=True)
class Inflow:
    """The latest requests that were let in.

    Attributes:
        recent: the latest last; their deadlines are in seconds after their arrivals.
    """

    recent: tuple[RequestView, ...] = ()

    def every_s(self, now_s: float) -> float:
        """Return the seconds between two of them at present; infinite if too few have come.

        The time since the last one counts: a rush that is over is forgotten as it passes.
        """
        if len(self.recent) < _FEWEST:
            return math.inf
        return (now_s - self.recent[0].arrival_s) / len(self.recent)


def observe_arrivals(inflow: Inflow, requests: Sequence[RequestView]) -> Inflow:
    """Return what is remembered after some more were let in."""
    relative = [replace(one, deadline_s=one.deadline_s - one.arrival_s) for one in requests]
    return Inflow((*inflow.recent, *relative)[-WINDOW:])
