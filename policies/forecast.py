"""When the requests of a small cell will be done, step by step, as its engines will batch them.

Every replica is followed from its last word on (:mod:`ray_cluster.policies.replica_course`): it is
leased what waits as places become free, by the dispatcher's own rule
(:mod:`ray_cluster.policies.placement`), steps those rows together that the policy of its engine
would choose, and decodes what is finished. What is likely to come later takes its part, too, if
that is asked for. Equal steps are taken at once, so it costs about a choice of a batch for each
request that begins or ends, and for every fourth round in which rows are left out.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from ray_cluster.policies.ordering import QueueKey, queue_key
from ray_cluster.policies.placement import WINDOW, Residency, passed_over, place
from ray_cluster.policies.pool import slowest_cost
from ray_cluster.policies.replica_course import ReplicaCourse, ReplicaScene
from ray_cluster.policies.types import RequestView

# of those that are likely to come, so many are looked at
_MOST_LATER = 24


@dataclass(frozen=True, slots=True)
class ForecastView:
    """All replicas of a model, and what comes to them.

    Attributes:
        now_s: present instant on the clock of the deadlines.
        line: what waits, in the queue's order.
        later: what is likely to come, one after the other and over again; their deadlines are in
            seconds after they come.
        later_every_s: seconds between two of these; infinite if nobody is likely to come.
        encode_s: seconds from the lease of a request until it can step.
        rest_s: seconds from the end of a request's decoding until the dispatcher knows of it.
    """

    now_s: float
    replicas: Sequence[ReplicaScene]
    line: Sequence[RequestView] = ()
    later: Sequence[RequestView] = ()
    later_every_s: float = math.inf
    encode_s: float = 0.0
    rest_s: float = 0.0

    @property
    def requests(self) -> tuple[RequestView, ...]:
        """All that are there."""
        return (*(one for replica in self.replicas for one in replica.requests), *self.line)


def forecast_s(scene: ForecastView, wanted: Sequence[RequestView] = ()) -> Mapping[str, float]:
    """Return the seconds from now until each request that is there ends, by its id.

    Args:
        scene: at least one replica, and who is there.
        wanted: those whose ends are asked for; others' may be left out. All if empty.
    """
    return _Course(scene, wanted or scene.requests).run()


class _Course:
    """What happens from the replicas' last words on."""

    def __init__(self, scene: ForecastView, wanted: Sequence[RequestView]) -> None:
        self._scene = scene
        self._replicas = [
            ReplicaCourse(one, now_s=scene.now_s, encode_s=scene.encode_s) for one in scene.replicas
        ]
        self._line = [(queue_key(one), one) for one in scene.line]
        self._holders: dict[str, set[int]] = {}
        self._residency = self._look_for_residents()
        self._num_free = self._count_free()
        self._num_come = 0
        self._wanted = {one.request_id for one in wanted}
        self._ends_s: dict[str, float] = {}

    def _look_for_residents(self) -> Residency | None:
        """Where is what the line and those who come later need; None if they need nothing."""
        scene = self._scene
        needs = {need for one in (*scene.line, *scene.later) for need in one.needs}
        if not needs:
            return None
        for row, one in enumerate(scene.replicas):
            self._hold(row, one.residents & needs)
        return Residency(
            slowest_cost([one.cost for one in scene.replicas]),
            max(one.max_batch for one in scene.replicas),
            self._holders,
        )

    def run(self) -> Mapping[str, float]:
        """Go on until all who are wanted have ended."""
        while self._wanted:
            replica = self._replicas[0]
            for one in self._replicas:
                if one.at_s < replica.at_s:
                    replica = one
            next_s = self._next_s()
            if next_s <= replica.at_s:
                if next_s == math.inf:
                    break
                self._come(next_s)
                continue
            done = replica.end_run()
            if done:
                self._num_free = self._count_free()
            for row in done:
                request_id = row.key[-1]
                self._ends_s[request_id] = max(0.0, replica.at_s) + self._scene.rest_s
                self._wanted.discard(request_id)
            if replica.at_s >= 0:
                self._deal(replica.at_s)
            replica.begin_run(self._next_s())
        return self._ends_s

    def _count_free(self) -> int:
        return sum([max(0, one.num_free) for one in self._replicas])

    def _next_s(self) -> float:
        """When somebody comes next: what waits can be leased from now on."""
        if self._line and self._num_free > 0:
            return 0.0
        if self._num_come >= _MOST_LATER or not self._scene.later:
            return math.inf
        return (self._num_come + 0.5) * self._scene.later_every_s

    def _come(self, at_s: float) -> None:
        """Take in who comes now."""
        scene = self._scene
        if not self._line or self._num_free <= 0:
            one = scene.later[self._num_come % len(scene.later)]
            arrival_s = scene.now_s + at_s
            deadline_s = arrival_s + one.deadline_s
            key = (-one.priority, deadline_s, arrival_s, "")
            if self._residency is not None:
                # it is placed by its deadline, and others of its id may be there
                one = replace(one, request_id=f"later {self._num_come}", deadline_s=deadline_s)
            insort(self._line, (key, one), key=itemgetter(0))
            self._num_come += 1
        self._deal(at_s)

    def _deal(self, at_s: float) -> None:
        """Lease what waits to those with room who have the least to do."""
        ready_s = at_s + self._scene.encode_s
        while self._line and self._num_free > 0:
            if self._residency is None:
                # what follows comes to the same then; this is the loop that admission waits for
                free = [one for one in self._replicas if one.num_free > 0]
                soonest = free[0] if len(free) == 1 else min(free, key=ReplicaCourse.level_s)
                key, request = self._line.pop(0)
                soonest.take(request, key, ready_s)
            else:
                row = self._soonest(self._residency)
                key, request = self._pop_next(row, self._residency, at_s)
                self._replicas[row].take(request, key, ready_s)
                self._hold(row, request.needs)
            self._num_free -= 1

    def _soonest(self, residency: Residency) -> int:
        """The row of the replica with room that has the least to do.

        Of equal ones it is that with most of what the first request needs, as in
        :func:`ray_cluster.policies.routing.soonest_first`.
        """
        free = [row for row, one in enumerate(self._replicas) if one.num_free > 0]
        if len(free) == 1:
            return free[0]
        levels_s = [self._replicas[row].level_s() for row in free]
        least_s = min(levels_s)
        equal = [row for row, level_s in zip(free, levels_s, strict=True) if level_s == least_s]
        num_here = residency.num_here(self._line[0][1], len(self._replicas))
        return max(equal, key=num_here.__getitem__)

    def _pop_next(
        self, row: int, residency: Residency, at_s: float
    ) -> tuple[QueueKey, RequestView]:
        """Take what a replica leases next out of the line."""
        window = [one for _, one in self._line[:WINDOW]]
        placed = place(window, 1, row, residency, self._scene.now_s + at_s)
        if placed.leased[0] == window[0].request_id:
            return self._line.pop(0)
        choice = [one.request_id for one in window].index(placed.leased[0])
        for passed, (key, one) in enumerate(self._line[:choice]):
            self._line[passed] = (key, passed_over(one))
        return self._line.pop(choice)

    def _hold(self, row: int, residents: Iterable[str]) -> None:
        """Have something resident on a replica from now on."""
        for one in residents:
            self._holders.setdefault(one, set()).add(row)
