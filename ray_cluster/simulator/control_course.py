"""What one run of a control loop was like over time: its requests bin by bin, its rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

import numpy as np

from ray_cluster.policies.cluster_state import ClusterState
from ray_cluster.simulator.arrivals import Floats
from ray_cluster.simulator.comparison import R
from ray_cluster.simulator.controlled import Round
from ray_cluster.simulator.jobs import SimulatedRequest
from ray_cluster.simulator.outcomes import SimulatedOutcome


@dataclass(frozen=True, slots=True)
class Course:
    """One run; requests are counted in the bin of their arrival.

    Attributes:
        bin_s: width of a bin.
        arrived: requests [B], by service.
        on_time: those that were in time, of all services [B].
        answered: those that got an image, late or not [B].
        heavy: of these, the heavy model's [B].
        states: what the loop saw, round by round; instants count from the beginning of the run.
    """

    bin_s: float
    arrived: tuple[tuple[str, Floats], ...]
    on_time: Floats
    answered: Floats
    heavy: Floats
    states: tuple[ClusterState, ...]

    @property
    def begins_s(self) -> list[float]:
        """Of every bin [B]."""
        return [self.bin_s * number for number in range(len(self.on_time))]

    @property
    def per_s(self) -> dict[str, list[float]]:
        """Requests per second [B], by service."""
        return {service: (counts / self.bin_s).tolist() for service, counts in self.arrived}

    @property
    def times_s(self) -> list[float]:
        """Of every round."""
        return [state.now_s for state in self.states]

    @property
    def waiting(self) -> list[float]:
        """Images in no batch at every round, of all models."""
        return [float(sum(one.num_waiting for one in state.models)) for state in self.states]

    @property
    def missed_shares(self) -> Floats:
        """Of the requests [B]; not a number where there were none."""
        arrived = np.sum([counts for _, counts in self.arrived], axis=0)
        return 1 - _shares(self.on_time, arrived)

    @property
    def heavy_shares(self) -> Floats:
        """Of the answers [B]; not a number where there were none."""
        return _shares(self.heavy, self.answered)


@dataclass(frozen=True, slots=True)
class ControlResult(Generic[R]):
    """What one run showed; its course only if it is to be seen."""

    row: R
    course: Course | None


def course_of(
    jobs: Sequence[SimulatedRequest],
    outcomes: Sequence[SimulatedOutcome],
    rounds: Sequence[Round],
    *,
    begin_s: float,
    bin_s: float,
) -> Course:
    """Return the course of a run.

    Args:
        jobs: all requests, at instants of the clock.
        outcomes: of those that have ended; others are late.
        rounds: of the loop.
        begin_s: instant of the clock at which the run began.
        bin_s: width of a bin.
    """
    last_s = max((job.arrival_s for job in jobs), default=begin_s)
    num_bins = int((last_s - begin_s) // bin_s) + 1

    def counts(arrivals_s: list[float]) -> Floats:
        bins = [int((at_s - begin_s) // bin_s) for at_s in arrivals_s]
        return np.bincount(np.array(bins, dtype=int), minlength=num_bins).astype(float)

    answered = [one for one in outcomes if one.answer != "dropped"]
    services = dict.fromkeys(job.service for job in jobs)
    return Course(
        bin_s,
        tuple(
            (one, counts([job.arrival_s for job in jobs if job.service == one])) for one in services
        ),
        counts([one.arrival_s for one in outcomes if one.on_time]),
        counts([one.arrival_s for one in answered]),
        counts([one.arrival_s for one in answered if one.answer == "heavy"]),
        tuple(_seen(one.state, begin_s) for one in rounds),
    )


def _seen(state: ClusterState, begin_s: float) -> ClusterState:
    """Without confidences, of which there are many."""
    services = tuple(replace(one, confidences=()) for one in state.services)
    return replace(state, now_s=state.now_s - begin_s, services=services)


def _shares(some: Floats, of: Floats) -> Floats:
    shares: Floats = np.divide(some, of, out=np.full(len(of), np.nan), where=of > 0)
    return shares
