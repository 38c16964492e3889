"""One replica of a forecast: which rows step together, run of steps after run of steps.

Equal steps are taken at once: a run lasts until a row ends, a request comes, or, where rows are
left out of the batch, for a few rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ray_cluster.policies.costs.cost_model import decode_s, encode_s, own_s
from ray_cluster.policies.leasing.ordering import QueueKey, queue_key
from ray_cluster.policies.steps.mixed_batching import Candidate, choose_batch, patience_of
from ray_cluster.policies.types import GroupCost, RequestView, StepCost

# rounds of a run in which rows are left out of the batch
_ROUNDS = 4
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Leased:
    """A request that a replica was leased after its last report.

    Attributes:
        at_s: seconds from now to the lease, 0 or less.
    """

    request: RequestView
    at_s: float


@dataclass(frozen=True, slots=True)
class ForecastReplica:
    """One replica as its last report had it.

    Attributes:
        reported_s: seconds from now to its last report of progress, 0 or less.
        held: requests that it had then, with their progress.
        leased: requests that it was leased since.
        residents: ids of what is resident there, or is being fetched.
        best_cost: the lowest known of it; None if that is the present one.
        group: what it costs on its ranks, if it has several.
        resumes: whether a request that it gives up goes on from its state, and not from the start.
    """

    cost: StepCost
    max_batch: int
    max_in_flight: int
    reported_s: float = 0.0
    held: Sequence[RequestView] = ()
    leased: Sequence[Leased] = ()
    residents: frozenset[str] = frozenset()
    best_cost: StepCost | None = None
    group: GroupCost | None = None
    resumes: bool = True

    @property
    def requests(self) -> tuple[RequestView, ...]:
        return (*self.held, *(one.request for one in self.leased))


@dataclass(slots=True, eq=False)
class SimulatedRow(Candidate):
    """A request on a simulated replica.

    Attributes:
        coding_s: seconds in which the replica decodes it and its previews, and encodes the image of
            an edit, all at its end.
        ready_s: when it can step, in seconds from now.
        stepped: the replica's rounds when it last stepped, or came.
    """

    coding_s: float = 0.0
    ready_s: float = 0.0
    stepped: int = 0


class ReplicaSimulation:
    """What happens on one replica.

    Args:
        start: what it has.
        now_s: present instant on the clock of the deadlines.
        encode_s: seconds from the lease of a request until it can step.
        num_fine: choices of a batch that are its engine's; after these, which cost most of a
            simulation, those rows step together that stand first in the queue's order, until one
            of them ends.

    Attributes:
        at_s: when its present run of steps ends; infinite while it is idle.
        num_free: how many more requests it can be leased.
    """

    def __init__(
        self, start: ForecastReplica, *, now_s: float, encode_s: float, num_fine: int
    ) -> None:
        self._now_s = now_s
        self._cost = start.cost
        self._share, self._max_batch = 1 / start.max_batch, start.max_batch
        self._further_s = min(start.cost.per_further_size_s, start.cost.fixed_s)
        rows = [self._row(one, queue_key(one), start.reported_s) for one in start.held]
        rows += [
            self._row(one.request, queue_key(one.request), one.at_s + encode_s)
            for one in start.leased
        ]
        self.num_free = start.max_in_flight - len(rows)
        # rows that can step, and that will; seconds of a step of all that can, if they are known
        self._ready: list[SimulatedRow] = []
        self._coming = rows
        self.at_s = self._coming_s = min([row.ready_s for row in rows], default=math.inf)
        self._all_s: float | None = None
        # the present run, and whether a row is done after it
        self._batch: Sequence[SimulatedRow] = ()
        self._rounds = 0
        self._ends_one = False
        self._rounds_done = 0
        self._num_fine = num_fine

    def _row(self, request: RequestView, key: QueueKey, ready_s: float) -> SimulatedRow:
        cost = self._cost
        return SimulatedRow(
            key,
            request.remaining_steps,
            own_s(cost, request),
            request.size_px,
            self._share,
            0,
            encode_s(cost, request) + (1 + request.previews_left) * decode_s(cost, request),
            ready_s,
        )

    def level_s(self) -> float:
        """Return the seconds that its rows take in full batches."""
        shared_s = self._cost.fixed_s * self._share
        return sum([row.left * (shared_s + row.own_s) for row in (*self._ready, *self._coming)])

    def lease(self, request: RequestView, key: QueueKey, ready_s: float) -> None:
        """Lease it one more request, which waits for the end of the present step."""
        row = self._row(request, key, ready_s)
        row.stepped = self._rounds_done
        self._coming.append(row)
        self._coming_s = min(self._coming_s, ready_s)
        self.num_free -= 1
        if self.at_s == math.inf:
            self.at_s = ready_s

    def end_run(self) -> Sequence[SimulatedRow]:
        """Count the steps of the run that ends now; return the rows that are done and decoded."""
        rounds = self._rounds
        if rounds:
            self._rounds, self._rounds_done = 0, self._rounds_done + rounds
            for row in self._batch:
                row.left -= rounds
                row.stepped = self._rounds_done
        self._admit_ready()
        if not self._ends_one:
            return ()
        done = [row for row in self._ready if row.left <= 0]
        self._ready = [row for row in self._ready if row.left > 0]
        self._ends_one, self._all_s = False, None
        self.num_free += len(done)
        self.at_s += sum([row.coding_s for row in done])
        return done

    def _admit_ready(self) -> None:
        soon_s = self.at_s + _ROUNDING
        if self._coming_s > soon_s:
            return
        come = [row for row in self._coming if row.ready_s <= soon_s]
        self._ready += come
        self._coming = [row for row in self._coming if row.ready_s > soon_s]
        self._coming_s = min([row.ready_s for row in self._coming], default=math.inf)
        self._all_s = None
        # a row that is only to be decoded has no steps left
        self._ends_one = self._ends_one or any(row.left <= 0 for row in come)

    def begin_run(self, next_s: float) -> None:
        """Choose a batch, and step it until the next choice.

        Args:
            next_s: when the next request comes that it may be leased.
        """
        self._admit_ready()
        if self._ends_one:
            return
        next_s = min(next_s, self._coming_s)
        if not self._ready:
            self.at_s = next_s if self._coming else math.inf
            return
        batch, step_s = self._choose()
        least = rounds = int(min([row.left for row in batch]))
        if len(batch) < len(self._ready):
            rounds = min(rounds, _ROUNDS if self._num_fine > 0 else least)
        if next_s - self.at_s < rounds * step_s:
            rounds = max(1, math.ceil((next_s - self.at_s) / step_s - _ROUNDING))
        self._batch, self._rounds, self._ends_one = batch, rounds, rounds == least
        self.at_s += rounds * step_s

    def _choose(self) -> tuple[Sequence[SimulatedRow], float]:
        """Return the rows that step next, and the seconds of a step."""
        now_s, ready = self._now_s + self.at_s, self._ready
        num_batches = len(ready) * self._share
        if num_batches <= 1 + _ROUNDING:
            if self._all_s is None:
                self._all_s = self._step_s(ready)
            step_s = self._all_s
            for row in ready:
                if row.key[1] - now_s < row.left * step_s:
                    break
            else:
                # the common case: all are in time together, whatever their order
                return ready, step_s
        self._num_fine -= 1
        if self._num_fine < 0:
            batch = sorted(ready, key=_place)[: self._max_batch]
            return batch, self._step_s(batch)
        patience, rounds_done = patience_of(math.ceil(num_batches - _ROUNDING)), self._rounds_done
        for row in ready:
            waited = rounds_done - row.stepped
            row.overdue = waited if waited >= patience else 0
        batch = choose_batch(ready, self._cost, now_s)
        return batch, self._step_s(batch)

    def _step_s(self, batch: Sequence[SimulatedRow]) -> float:
        further = len({row.size_px for row in batch}) - 1
        return self._cost.fixed_s + self._further_s * further + sum([row.own_s for row in batch])


def _place(row: SimulatedRow) -> QueueKey:
    return row.key
