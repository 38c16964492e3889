"""What will happen on one replica: which rows step together, run of steps after run of steps.

Steps that are alike are taken at once: a run goes on until a row ends, somebody comes, or, where
rows are left out of the batch, for a few rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ray_cluster.policies.batch_choice import Candidate, choose_batch
from ray_cluster.policies.cost_model import decode_s, own_s
from ray_cluster.policies.mixed_batching import patience_of
from ray_cluster.policies.ordering import QueueKey, queue_key
from ray_cluster.policies.previews import previews_left
from ray_cluster.policies.types import RequestView, StepCost

# rounds after which it is decided anew where rows are left out of a batch
_ROUNDS = 4
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Leased:
    """A request that a replica was given after its last word.

    Attributes:
        at_s: seconds from now to the lease, 0 or less.
    """

    request: RequestView
    at_s: float


@dataclass(frozen=True, slots=True)
class ReplicaScene:
    """One replica, as it was.

    Attributes:
        told_s: seconds from now to its last word of its progress, 0 or less.
        held: what it had then, as it was.
        leased: what it was given since.
        residents: ids of what is resident there, or is being fetched.
    """

    cost: StepCost
    max_batch: int
    max_in_flight: int
    told_s: float = 0.0
    held: Sequence[RequestView] = ()
    leased: Sequence[Leased] = ()
    residents: frozenset[str] = frozenset()

    @property
    def requests(self) -> tuple[RequestView, ...]:
        """All that it has."""
        return (*self.held, *(one.request for one in self.leased))


@dataclass(slots=True, eq=False)
class CourseRow(Candidate):
    """A request on its way.

    Attributes:
        decode_s: seconds that the replica decodes it and its previews, all at its end.
        ready_s: when it can step, in seconds from now.
        stepped: the replica's rounds when it last stepped, or came.
    """

    decode_s: float = 0.0
    ready_s: float = 0.0
    stepped: int = 0


def _previews_left(request: RequestView) -> int:
    if not request.num_previews:
        return 0
    return previews_left(request.num_steps, request.num_previews, request.steps_done)


class ReplicaCourse:
    """What happens on one replica.

    Args:
        own: what it was, and has.
        now_s: present instant on the clock of the deadlines.
        encode_s: seconds from the lease of a request until it can step.

    Attributes:
        at_s: when its present run of steps ends; infinite while it has nothing to do.
        num_free: how many more it can be given.
    """

    def __init__(self, own: ReplicaScene, *, now_s: float, encode_s: float) -> None:
        self._now_s = now_s
        self._cost = own.cost
        self._share = 1 / own.max_batch
        self._further_s = min(own.cost.per_further_size_s, own.cost.fixed_s)
        rows = [self._row(one, queue_key(one), own.told_s) for one in own.held]
        rows += [
            self._row(one.request, queue_key(one.request), one.at_s + encode_s)
            for one in own.leased
        ]
        self.num_free = own.max_in_flight - len(rows)
        # who can step, and who will; seconds of a step of all that can, if they are known
        self._ready: list[CourseRow] = []
        self._coming = rows
        self.at_s = self._coming_s = min([row.ready_s for row in rows], default=math.inf)
        self._all_s: float | None = None
        # the present run, and whether somebody is done after it
        self._batch: Sequence[CourseRow] = ()
        self._rounds = 0
        self._ends_one = False
        self._rounds_done = 0

    def _row(self, request: RequestView, key: QueueKey, ready_s: float) -> CourseRow:
        cost = self._cost
        return CourseRow(
            key,
            request.remaining_steps,
            own_s(cost, request),
            request.size_px,
            self._share,
            0,
            (1 + _previews_left(request)) * decode_s(cost, request),
            ready_s,
        )

    def level_s(self) -> float:
        """Return the seconds that its rows take in full batches."""
        shared_s = self._cost.fixed_s * self._share
        return sum([row.left * (shared_s + row.own_s) for row in (*self._ready, *self._coming)])

    def take(self, request: RequestView, key: QueueKey, ready_s: float) -> None:
        """Have one more request, which waits for the end of the present step."""
        row = self._row(request, key, ready_s)
        row.stepped = self._rounds_done
        self._coming.append(row)
        self._coming_s = min(self._coming_s, ready_s)
        self.num_free -= 1
        if self.at_s == math.inf:
            self.at_s = ready_s

    def end_run(self) -> Sequence[CourseRow]:
        """Count the steps of the run that ends now; return who is done, after their decoding."""
        rounds = self._rounds
        if rounds:
            self._rounds, self._rounds_done = 0, self._rounds_done + rounds
            for row in self._batch:
                row.left -= rounds
                row.stepped = self._rounds_done
        self._let_come()
        if not self._ends_one:
            return ()
        done = [row for row in self._ready if row.left <= 0]
        self._ready = [row for row in self._ready if row.left > 0]
        self._ends_one, self._all_s = False, None
        self.num_free += len(done)
        self.at_s += sum([row.decode_s for row in done])
        return done

    def _let_come(self) -> None:
        """Let those step who can by now."""
        soon_s = self.at_s + _ROUNDING
        if self._coming_s > soon_s:
            return
        come = [row for row in self._coming if row.ready_s <= soon_s]
        self._ready += come
        self._coming = [row for row in self._coming if row.ready_s > soon_s]
        self._coming_s = min([row.ready_s for row in self._coming], default=math.inf)
        self._all_s = None
        # whoever is about to be decoded has no steps left
        self._ends_one = self._ends_one or any(row.left <= 0 for row in come)

    def begin_run(self, next_s: float) -> None:
        """Choose a batch, and step it until it is to be decided anew.

        Args:
            next_s: when somebody comes next whom it may be given.
        """
        self._let_come()
        if self._ends_one:
            return
        next_s = min(next_s, self._coming_s)
        if not self._ready:
            self.at_s = next_s if self._coming else math.inf
            return
        batch, step_s = self._choose()
        least = rounds = int(min([row.left for row in batch]))
        if len(batch) < len(self._ready):
            rounds = min(rounds, _ROUNDS)
        if next_s - self.at_s < rounds * step_s:
            rounds = max(1, math.ceil((next_s - self.at_s) / step_s - _ROUNDING))
        self._batch, self._rounds, self._ends_one = batch, rounds, rounds == least
        self.at_s += rounds * step_s

    def _choose(self) -> tuple[Sequence[CourseRow], float]:
        """Return who steps next, and the seconds of a step."""
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
                # most often nobody minds anybody, whatever their order
                return ready, step_s
        patience, rounds_done = patience_of(math.ceil(num_batches - _ROUNDING)), self._rounds_done
        for row in ready:
            waited = rounds_done - row.stepped
            row.overdue = waited if waited >= patience else 0
        batch = choose_batch(ready, self._cost, now_s)
        return batch, self._step_s(batch)

    def _step_s(self, batch: Sequence[CourseRow]) -> float:
        further = len({row.size_px for row in batch}) - 1
        return self._cost.fixed_s + self._further_s * further + sum([row.own_s for row in batch])
