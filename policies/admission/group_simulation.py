"""One group of ranks in a forecast: which of its requests step on how many ranks, end after end.

Its head asks :func:`ray_cluster.policies.sequence_parallel.rounds.plan_round` at every arrival and
end; so does this, with what is left of requests as real numbers of steps (a fluid).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ray_cluster.policies.admission.replica_simulation import ForecastReplica
from ray_cluster.policies.costs.cost_model import encode_s
from ray_cluster.policies.leasing.ordering import QueueKey, queue_key
from ray_cluster.policies.sequence_parallel.fluid import grant_wide
from ray_cluster.policies.sequence_parallel.menus import menu_of_request
from ray_cluster.policies.sequence_parallel.rounds import RoundOptions, plan_round
from ray_cluster.policies.sequence_parallel.types import DegreeMenu, GroupRequest, GroupView
from ray_cluster.policies.types import RequestView

_ROUNDING_S = 1e-9
# requests among which one of the head's decisions is counted on to choose, beside what any costs
_ROWS, _ANY = 8, 2


def rows_of_decisions(num_requests: int, max_in_flight: int, *, num_fine: int) -> int:
    """Return among how many requests a group's decisions choose, summed over all of them.

    Args:
        num_requests: that it serves until it is idle.
        num_fine: see :class:`GroupSimulation`, which bounds the sum by it.
    """
    held = min(num_requests, max_in_flight)
    # it decides at the end of each request, first among as many as it may hold
    rows = (num_requests - held) * held + held * (held + 1) // 2
    return min(num_fine * (_ROWS + _ANY), rows + _ANY * num_requests)


@dataclass(slots=True, eq=False)
class GroupRow:
    """A request on a simulated group.

    Attributes:
        left: steps, with a part of one.
        ready_s: when it can step, in seconds from now; once it has all steps, when it is decoded.
        level: of its menu, at which it steps now; -1 while it waits.
        has_begun: whether it ever stepped.
    """

    key: QueueKey
    request: RequestView
    menu: DegreeMenu
    left: float
    ready_s: float
    level: int = -1
    has_begun: bool = False


class GroupSimulation:
    """What happens on one group; see :class:`.replica_simulation.ReplicaSimulation`.

    Args:
        start: what it has, with what its ranks cost.
        now_s: present instant on the clock of the deadlines.
        encode_s: seconds from the lease of a request until it can step.
        num_fine: decisions over a usual number of requests that are its head's, fewer over more;
            after these, which cost most of a simulation, each request has as many ranks as it can
            use, in the queue's order.

    Attributes:
        at_s: when something ends or comes next; infinite while it is idle.
        num_free: how many more requests it can be leased.
    """

    def __init__(
        self, start: ForecastReplica, *, now_s: float, encode_s: float, num_fine: int
    ) -> None:
        assert start.group is not None, "it is a group"
        self._now_s, self._group = now_s, start.group
        self._effort = num_fine * (_ROWS + _ANY)
        self._options = RoundOptions(start.group.guard, drops=False)
        rows = [self._row(one, queue_key(one), start.reported_s) for one in start.held]
        rows += [
            self._row(one.request, queue_key(one.request), one.at_s + encode_s)
            for one in start.leased
        ]
        self.num_free = start.max_in_flight - len(rows)
        self._coming = rows
        self._stepping: list[GroupRow] = []
        self._coding: list[GroupRow] = []
        self._is_changed = False
        self._began_s = self.at_s = min([row.ready_s for row in rows], default=math.inf)

    def _row(self, request: RequestView, key: QueueKey, ready_s: float) -> GroupRow:
        cost = self._group.costs[0].cost
        return GroupRow(
            key,
            request,
            menu_of_request(request, self._group),
            request.remaining_steps,
            ready_s + encode_s(cost, request),
            has_begun=request.steps_done > 0,
        )

    def level_s(self) -> float:
        """Return the seconds that its rows take one after the other, each as fast as it can be."""
        return sum([row.left * row.menu.fastest_s for row in (*self._stepping, *self._coming)])

    def lease(self, request: RequestView, key: QueueKey, ready_s: float) -> None:
        """Lease it one more request."""
        row = self._row(request, key, ready_s)
        self._coming.append(row)
        self.num_free -= 1
        if self.at_s == math.inf:
            self._began_s = row.ready_s
        self.at_s = min(self.at_s, row.ready_s)

    def end_run(self) -> Sequence[GroupRow]:
        """Let time pass until :attr:`at_s`; return the rows that are decoded then."""
        span_s, self._began_s = max(0.0, self.at_s - self._began_s), self.at_s
        for row in self._stepping:
            if row.level >= 0:
                row.left -= span_s / row.menu.step_s[row.level]
        self._admit_ready()
        soon_s = self.at_s + _ROUNDING_S
        done = [row for row in self._coding if row.ready_s <= soon_s]
        self._coding = [row for row in self._coding if row.ready_s > soon_s]
        self.num_free += len(done)
        return done

    def _admit_ready(self) -> None:
        """Move rows that have come to the ranks, and those that have all steps to the decoder."""
        soon_s = self.at_s + _ROUNDING_S
        come = [row for row in self._coming if row.ready_s <= soon_s]
        if come:
            self._coming = [row for row in self._coming if row.ready_s > soon_s]
            self._stepping += come
        ended = [row for row in self._stepping if row.left * row.menu.fastest_s <= _ROUNDING_S]
        for row in ended:
            self._stepping.remove(row)
            row.ready_s = self.at_s + row.menu.tail_s
            self._coding.append(row)
        self._is_changed = self._is_changed or bool(come or ended)

    def begin_run(self, next_s: float) -> None:
        """Decide, and go on until something ends or comes.

        Args:
            next_s: when the next request comes that it may be leased.
        """
        self._admit_ready()
        if self._is_changed and self._stepping:
            self._decide()
        self._is_changed = False
        ends_s = [
            self.at_s + row.left * row.menu.step_s[row.level]
            for row in self._stepping
            if row.level >= 0
        ]
        ends_s += [row.ready_s for row in (*self._coming, *self._coding)]
        next_end_s = min(ends_s, default=math.inf)
        self.at_s = (
            next_end_s if next_end_s == math.inf else min(next_end_s, max(next_s, self.at_s))
        )

    def _decide(self) -> None:
        """Give rows ranks, and charge those that change theirs."""
        rows, num_ranks = self._stepping, self._group.num_ranks
        self._effort -= len(rows) + _ANY
        if self._effort < 0:
            rows.sort(key=lambda row: row.key)
            granted = grant_wide([row.menu for row in rows], range(len(rows)), num_ranks)
            levels = [granted.get(number, -1) for number in range(len(rows))]
        else:
            view = GroupView(
                num_ranks,
                self._now_s + self.at_s,
                tuple(self._seen(number, row) for number, row in enumerate(rows)),
                self._group.switch_s,
            )
            degrees = plan_round(view, self._options).degrees
            levels = [row.menu.level_of(degree) for row, degree in zip(rows, degrees, strict=True)]
        for row, level in zip(rows, levels, strict=True):
            if level >= 0 and level != row.level and row.has_begun:
                row.left += self._group.switch_s / row.menu.step_s[level]
            row.level = level
            row.has_begun = row.has_begun or level >= 0

    def _seen(self, number: int, row: GroupRow) -> GroupRequest:
        request = row.request
        return GroupRequest(
            request_id=number,
            menu=row.menu,
            steps_left=row.left,
            arrival_s=request.arrival_s,
            deadline_s=request.deadline_s,
            has_begun=row.has_begun,
            degree=0 if row.level < 0 else row.menu.degrees[row.level],
            ready_s=-math.inf,
        )
