"""A stage that works in batches on what has arrived; an error costs only its own request."""

from __future__ import annotations

import queue
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from ray_cluster.engine.device_errors import raise_if_broken
from ray_cluster.engine.tickets import LiveTickets, Ticket
from ray_cluster.errors import REQUEST_ERRORS

ResultT = TypeVar("ResultT")


class BatchStage(Generic[ResultT]):
    """Takes tickets from its queue, groups them, works on each group and hands results on.

    Args:
        live: tickets that are not in it are dropped.
        work: maps tickets of one group to one result each.
        group_of: tickets of different groups are never worked on together.
        on_done: called with each ticket and its result.
        on_error: called with a ticket whose work raised when it was tried alone.
        max_batch: most tickets in one group.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        live: LiveTickets,
        *,
        work: Callable[[Sequence[Ticket]], Sequence[ResultT]],
        group_of: Callable[[Ticket], Hashable],
        on_done: Callable[[Ticket, ResultT], None],
        on_error: Callable[[Ticket, Exception], None],
        max_batch: int,
        clock: Callable[[], float],
    ) -> None:
        self._live = live
        self._work = work
        self._group_of = group_of
        self._on_done = on_done
        self._on_error = on_error
        self._max_batch = max_batch
        self._clock = clock
        self._busy_since_s: float | None = None
        self._queue: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()

    @property
    def silence_s(self) -> float:
        """Seconds that the stage has been at its present piece of work; 0 while it waits."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def put(self, ticket: Ticket) -> None:
        """Queue a ticket; from any thread."""
        self._queue.put(ticket)

    def close(self) -> None:
        """End :meth:`run` once it has worked on what is queued."""
        self._queue.put(None)

    def run(self) -> None:
        """Work until closed; the body of the stage's thread.

        Raises:
            DeviceBroken: no later piece of work can succeed in this process.
        """
        # no local of this loop may keep a ticket alive while the stage waits for the next
        while self._work_off(self._next()):
            self._busy_since_s = None

    def _work_off(self, tickets: Sequence[Ticket]) -> bool:
        groups: dict[Hashable, list[Ticket]] = {}
        for ticket in tickets:
            groups.setdefault(self._group_of(ticket), []).append(ticket)
        for group in groups.values():
            self._process([ticket for ticket in group if ticket in self._live])
        return bool(tickets)

    def _next(self) -> list[Ticket]:
        """Wait for a ticket and take what else is there; nothing when closed."""
        tickets: list[Ticket] = []
        while len(tickets) < self._max_batch:
            try:
                ticket = self._queue.get(block=not tickets)
            except queue.Empty:
                break
            if ticket is None:
                if tickets:
                    self._queue.put(None)
                break
            tickets.append(ticket)
        return tickets

    def _process(self, tickets: Sequence[Ticket]) -> None:
        if not tickets:
            return
        self._busy_since_s = self._clock()
        try:
            results = self._work(tickets)
        except REQUEST_ERRORS as error:
            raise_if_broken(error)
            # the traceback holds the tensors of the failed call
            failure = error.with_traceback(None)
        else:
            for ticket, result in zip(tickets, results, strict=True):
                self._on_done(ticket, result)
            return
        if len(tickets) == 1:
            self._on_error(tickets[0], failure)
            return
        for ticket in tickets:
            self._process([ticket])
