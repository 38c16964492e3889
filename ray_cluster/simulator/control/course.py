"""What a run of a control loop was like over time: requests by bin, and the state at each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ray_cluster.policies.planning.cluster_state import ClusterState
from ray_cluster.simulator.arrivals import Floats
from ray_cluster.simulator.cell.cell import Fate
from ray_cluster.simulator.reports import Line
from ray_cluster.simulator.workload import Arrival


@dataclass(frozen=True, slots=True)
class Course:
    """One run; requests are counted in the bin of their arrival.

    Attributes:
        bin_s: width of a bin.
        arrived: requests [B], by service.
        on_time: of all services [B].
        answered: requests that got an image, late or not [B].
        heavy: of these, the heavy model's [B].
        states: at every round; instants count from the beginning of the run.
    """

    bin_s: float
    arrived: Mapping[str, Floats]
    on_time: Floats
    answered: Floats
    heavy: Floats
    states: tuple[ClusterState, ...]

    @property
    def missed_shares(self) -> Floats:
        """Of the requests [B]; not a number where there were none."""
        return 1 - _shares(self.on_time, np.sum(list(self.arrived.values()), axis=0))

    @property
    def heavy_shares(self) -> Floats:
        """Of the answers [B]; not a number where there were none."""
        return _shares(self.heavy, self.answered)

    def by_bin(self, values: Floats) -> Line:
        return Line([self.bin_s * number for number in range(len(values))], values.tolist())

    def by_round(self, value: Callable[[ClusterState], float]) -> Line:
        return Line([one.now_s for one in self.states], [value(one) for one in self.states])

    @property
    def requests_per_s(self) -> dict[str, Line]:
        """By service, over time."""
        return {name: self.by_bin(counts / self.bin_s) for name, counts in self.arrived.items()}

    @property
    def waiting(self) -> Line:
        """Images in no batch, of all models, over time."""
        return self.by_round(lambda state: sum(one.num_waiting for one in state.models))


def course_of(
    requests: Sequence[Arrival],
    fates: Sequence[Fate],
    states: Sequence[ClusterState],
    *,
    begin_s: float,
    bin_s: float,
) -> Course:
    """Return the course of a run that began at an instant of the clock.

    Requests without a fate are late.
    """
    last_s = max((one.arrival_s for one in requests), default=begin_s)
    num_bins = int((last_s - begin_s) // bin_s) + 1

    def counts(some: Iterable[Arrival]) -> Floats:
        bins = [int((one.arrival_s - begin_s) // bin_s) for one in some]
        return np.bincount(np.array(bins, dtype=int), minlength=num_bins).astype(float)

    answered = [one for one in fates if one.end == "finished"]
    services = dict.fromkeys(one.slo_class for one in requests)
    # without confidences, of which there are many
    plain = [
        replace(
            one,
            now_s=one.now_s - begin_s,
            services=tuple(replace(each, confidences=()) for each in one.services),
        )
        for one in states
    ]
    return Course(
        bin_s,
        {name: counts(one for one in requests if one.slo_class == name) for name in services},
        counts(one.arrival for one in answered if one.is_met),
        counts(one.arrival for one in answered),
        counts(one.arrival for one in answered if one.stage == "heavy"),
        tuple(plain),
    )


def _shares(some: Floats, of: Floats) -> Floats:
    shares: Floats = np.divide(some, of, out=np.full(len(of), np.nan), where=of > 0)
    return shares
