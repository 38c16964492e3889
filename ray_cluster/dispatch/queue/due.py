"""When something is due of each open request, without a look at all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace

from ray_cluster.dispatch.records import RequestRecord

# of one kind that are dealt with in one turn of the dispatcher; others come in the next ones
AT_ONCE = 25
# ended requests whose instants are remembered, beside as many as there are others
_MOST_GONE = 1000


class Due:
    """A heap of instants with the ids of requests; ids that are not known any more are skipped.

    An instant may become a later one at any time; that is found out when the earlier one comes.

    Args:
        due_s: the instant of a request now; infinite if never.
        find: returns an open request by id; None for one that has ended.
    """

    def __init__(
        self,
        due_s: Callable[[RequestRecord], float],
        find: Callable[[str], RequestRecord | None],
    ) -> None:
        self._due_s = due_s
        self._find = find
        self._instants: list[tuple[float, str]] = []

    def restart(self, request_ids: Iterable[str]) -> None:
        """Watch these alone: an instant may have become an earlier one, which is found out soon."""
        self._instants = [(-math.inf, one) for one in request_ids]

    def add(self, record: RequestRecord, num_open: int) -> None:
        """Watch one more of so many open requests, if something may become due of it."""
        due_s = self._due_s(record)
        if due_s == math.inf:
            return
        heappush(self._instants, (due_s, record.view.request_id))
        if len(self._instants) > 2 * num_open + _MOST_GONE:
            self._instants = [one for one in self._instants if self._find(one[1]) is not None]
            heapify(self._instants)

    def take(self, now_s: float) -> list[RequestRecord]:
        """Return open requests that are due, each once, and so many of them at most."""
        # an id that was used again is there twice
        found: dict[str, RequestRecord] = {}
        for _ in range(AT_ONCE):
            if not self._instants or self._instants[0][0] > now_s:
                break
            if (record := self._first()) is not None:
                heappop(self._instants)
                found[record.view.request_id] = record
        return list(found.values())

    @property
    def next_s(self) -> float:
        """Instant before which nothing is due; infinite without any."""
        for _ in range(AT_ONCE):
            if not self._instants or self._first() is not None:
                break
        return self._instants[0][0] if self._instants else math.inf

    def _first(self) -> RequestRecord | None:
        """Return the first request; None if it has ended or is due later, and no more the first."""
        told_s, request_id = self._instants[0]
        # its id may have been used again since
        record = self._find(request_id)
        due_s = math.inf if record is None else self._due_s(record)
        if due_s == told_s:
            return record
        if due_s == math.inf:
            heappop(self._instants)
        else:
            heapreplace(self._instants, (due_s, request_id))
        return None
