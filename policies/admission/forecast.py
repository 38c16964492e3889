"""When the requests of a small cell will be done, simulated step by step as its engines batch them.

Every replica goes on from its last report
(:mod:`ray_cluster.policies.admission.replica_simulation`): it leases from the queue as slots become
free, by the dispatcher's own rule
(:mod:`ray_cluster.policies.leasing.placement`), steps those rows together that its engine's policy
would choose, and decodes what is finished. Later arrivals are extrapolated, if that is asked for.
Equal steps are taken at once, so a forecast costs about a choice of a batch for each request that
begins or ends, and for every fourth round in which rows are left out.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Protocol

from ray_cluster.policies.admission.fluid import slowest_cost
from ray_cluster.policies.admission.group_simulation import GroupSimulation, rows_of_decisions
from ray_cluster.policies.admission.replica_simulation import ForecastReplica, ReplicaSimulation
from ray_cluster.policies.leasing.ordering import QueueKey, queue_key
from ray_cluster.policies.leasing.placement import WINDOW, Residency, passed_over, place
from ray_cluster.policies.types import GroupCost, RequestView

# larger cells are predicted as a fluid: requests, waiting and leased, and replicas; so are some
# that have almost as many of both, by what a forecast of them costs
MOST_REQUESTS, MOST_REPLICAS = 96, 16
# choices of a batch that are simulated as engines make them, over all replicas, and of each
_MOST_FINE, _FEWEST_FINE = 32, 3
# with a group, and without it
FEWEST_FORECASTS = 2
# what the forecasts of one decision may cost, and one of them, a choice and each row that it is
# among, a request and a replica do: in about microseconds of a usual core
_BUDGET = 4000.0
_FORECAST, _CHOICE, _ROW, _REQUEST, _REPLICA = 170.0, 4.0, 1.3, 14.0, 40.0
# and the choice among waiting requests that need adapters
_PLACED = 40.0
# a request among which a group of ranks decides, and the menu of its degrees
_DECIDED, _MENU = 5.0, 11.0
# later arrivals that a forecast has at most
_MOST_LATER = 24


class Slots(Protocol):
    """How much a replica takes."""

    @property
    def max_in_flight(self) -> int:
        """Most requests that it holds."""

    @property
    def max_batch(self) -> int:
        """Most of them that it steps together."""

    @property
    def group(self) -> GroupCost | None:
        """What it costs on its ranks, if it has several."""


@dataclass(frozen=True, slots=True)
class ForecastView:
    """All replicas of a model and their queue.

    Attributes:
        now_s: present instant on the clock of the deadlines.
        queue: waiting requests, in the queue's order.
        later: likely arrivals, one after the other and over again; their deadlines are in seconds
            after they arrive.
        later_every_s: seconds between two of these; infinite if none are likely.
        encode_s: seconds from the lease of a request until it can step.
        rest_s: seconds from the end of a request's decoding until the dispatcher knows of it.
    """

    now_s: float
    replicas: Sequence[ForecastReplica]
    queue: Sequence[RequestView] = ()
    later: Sequence[RequestView] = ()
    later_every_s: float = math.inf
    encode_s: float = 0.0
    rest_s: float = 0.0

    @property
    def requests(self) -> tuple[RequestView, ...]:
        """All that wait or are leased."""
        return (*(one for replica in self.replicas for one in replica.requests), *self.queue)


def forecasts_within_budget(num_requests: int, num_placed: int, slots: Sequence[Slots]) -> int:
    """Return how many forecasts of a cell one decision may have.

    It takes two to tell whether a group makes others late: where there are fewer, the cell is too
    much to simulate. A replica chooses a batch whenever a request begins or ends there, among all
    that it holds; and more often where it holds more than it batches.

    Args:
        num_requests: that wait or are leased.
        num_placed: those that wait, if one of them needs adapters or a template.
        slots: of each replica.
    """
    part = math.ceil(num_requests / len(slots))
    groups = [one for one in slots if one.group is not None]
    num_fine = _num_fine(len(slots))
    decided = sum(rows_of_decisions(part, one.max_in_flight, num_fine=num_fine) for one in groups)
    effort = _FORECAST + _DECIDED * decided + (_MENU * num_requests if groups else 0.0)
    effort += _choices(num_requests, [one for one in slots if one.group is None], len(slots))
    effort += _REQUEST * num_requests + _PLACED * num_placed + _REPLICA * len(slots)
    return int(_BUDGET / effort)


def _num_fine(num_replicas: int) -> int:
    """How many decisions are simulated as engines make them, of each replica."""
    return max(_FEWEST_FINE, _MOST_FINE // num_replicas)


def _choices(num_requests: int, plain: Sequence[Slots], num_replicas: int) -> float:
    """What the choices of batches cost on the replicas that are no groups."""
    if not plain:
        return 0.0
    # twice their equal part: some have more than others
    part = 2 * math.ceil(num_requests / num_replicas)
    held = max(min(one.max_in_flight, part) for one in plain)
    leaves_some_out = any(min(one.max_in_flight, part) > one.max_batch for one in plain)
    most_fine = max(_MOST_FINE, _FEWEST_FINE * len(plain))
    num_fine = most_fine if leaves_some_out else min(most_fine, num_requests + len(plain))
    return num_fine * (_CHOICE + _ROW * held)


def forecast_s(view: ForecastView, wanted: Sequence[RequestView] = ()) -> Mapping[str, float]:
    """Return the seconds from now until each request ends, by its id.

    Args:
        view: at least one replica.
        wanted: requests whose ends are asked for; others' may be missing. All if empty.
    """
    return _Simulation(view, wanted or view.requests).run()


class _Simulation:
    """What happens from the replicas' last reports on."""

    def __init__(self, view: ForecastView, wanted: Sequence[RequestView]) -> None:
        self._view = view
        self._replicas: list[ReplicaSimulation | GroupSimulation] = [
            (ReplicaSimulation if one.group is None else GroupSimulation)(
                one,
                now_s=view.now_s,
                encode_s=view.encode_s,
                num_fine=_num_fine(len(view.replicas)),
            )
            for one in view.replicas
        ]
        self._queue = [(queue_key(one), one) for one in view.queue]
        self._holders: dict[str, set[int]] = {}
        self._residency = self._residency_of_needs()
        self._num_free = self._count_free()
        self._num_arrived = 0
        self._wanted = {one.request_id for one in wanted}
        self._ends_s: dict[str, float] = {}

    def _residency_of_needs(self) -> Residency | None:
        """Where is what the queue and later arrivals need; None if they need nothing."""
        view = self._view
        needs = {need for one in (*view.queue, *view.later) for need in one.needs}
        if not needs:
            return None
        for row, one in enumerate(view.replicas):
            self._hold(row, one.residents & needs)
        return Residency(
            slowest_cost([one.cost for one in view.replicas]),
            max(one.max_batch for one in view.replicas),
            self._holders,
        )

    def run(self) -> Mapping[str, float]:
        """Go on until all wanted requests have ended."""
        while self._wanted:
            replica = self._replicas[0]
            for one in self._replicas:
                if one.at_s < replica.at_s:
                    replica = one
            next_s = self._next_s()
            if next_s <= replica.at_s:
                if next_s == math.inf:
                    break
                self._arrive(next_s)
                continue
            done = replica.end_run()
            if done:
                self._num_free = self._count_free()
            for row in done:
                request_id = row.key[-1]
                self._ends_s[request_id] = max(0.0, replica.at_s) + self._view.rest_s
                self._wanted.discard(request_id)
            if replica.at_s >= 0:
                self._lease(replica.at_s)
            replica.begin_run(self._next_s())
        return self._ends_s

    def _count_free(self) -> int:
        return sum([max(0, one.num_free) for one in self._replicas])

    def _next_s(self) -> float:
        """When the next lease or arrival is: what waits can be leased from now on."""
        if self._queue and self._num_free > 0:
            return 0.0
        if self._num_arrived >= _MOST_LATER or not self._view.later:
            return math.inf
        return (self._num_arrived + 0.5) * self._view.later_every_s

    def _arrive(self, at_s: float) -> None:
        view = self._view
        if not self._queue or self._num_free <= 0:
            one = view.later[self._num_arrived % len(view.later)]
            arrival_s = view.now_s + at_s
            deadline_s = arrival_s + one.deadline_s
            key = (-one.priority, deadline_s, arrival_s, "")
            if self._residency is not None:
                # it is placed by its deadline, and its id must be its own
                one = replace(one, request_id=f"later {self._num_arrived}", deadline_s=deadline_s)
            insort(self._queue, (key, one), key=itemgetter(0))
            self._num_arrived += 1
        self._lease(at_s)

    def _lease(self, at_s: float) -> None:
        """Lease what waits to the replicas with free slots that have the least to do."""
        ready_s = at_s + self._view.encode_s
        while self._queue and self._num_free > 0:
            if self._residency is None:
                # the short way to the same; admission waits for this loop
                free = [one for one in self._replicas if one.num_free > 0]
                soonest = free[0] if len(free) == 1 else min(free, key=lambda one: one.level_s())
                key, request = self._queue.pop(0)
                soonest.lease(request, key, ready_s)
            else:
                row = self._soonest(self._residency)
                key, request = self._pop_next(row, self._residency, at_s)
                self._replicas[row].lease(request, key, ready_s)
                self._hold(row, request.needs)
            self._num_free -= 1

    def _soonest(self, residency: Residency) -> int:
        """The row of the replica with a free slot that has the least to do.

        Of equal ones it is that with most of what the first request needs, as in
        :func:`ray_cluster.policies.leasing.routing.soonest_first`.
        """
        free = [row for row, one in enumerate(self._replicas) if one.num_free > 0]
        if len(free) == 1:
            return free[0]
        levels_s = [self._replicas[row].level_s() for row in free]
        least_s = min(levels_s)
        equal = [row for row, level_s in zip(free, levels_s, strict=True) if level_s == least_s]
        num_here = residency.num_here(self._queue[0][1], len(self._replicas))
        return max(equal, key=num_here.__getitem__)

    def _pop_next(
        self, row: int, residency: Residency, at_s: float
    ) -> tuple[QueueKey, RequestView]:
        window = [one for _, one in self._queue[:WINDOW]]
        placed = place(window, 1, row, residency, self._view.now_s + at_s)
        if placed.leased[0] == window[0].request_id:
            return self._queue.pop(0)
        choice = [one.request_id for one in window].index(placed.leased[0])
        for passed, (key, one) in enumerate(self._queue[:choice]):
            self._queue[passed] = (key, passed_over(one))
        return self._queue.pop(choice)

    def _hold(self, row: int, residents: Iterable[str]) -> None:
        for one in residents:
            self._holders.setdefault(one, set()).add(row)
