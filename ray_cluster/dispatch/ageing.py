"""When requests that wait will have waited too long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from ray_cluster.dispatch.state import RequestRecord
from ray_cluster.policies.ordering import ages_at_s
from ray_cluster.policies.types import RequestView

# ended requests whose ageing is remembered, beside as many as there are others
_MOST_GONE = 1000


class Ageing:
    """A heap of instants with ids; ids that are not known any more are skipped.

    Args:
        starvation_s: see :func:`ages_at_s`.
        find: returns an open request by id; None for one that has ended.
    """

    def __init__(self, starvation_s: float, find: Callable[[str], RequestRecord | None]) -> None:
        self._starvation_s = starvation_s
        self._find = find
        self._instants: list[tuple[float, str]] = []

    def restart(self, starvation_s: float, views: Iterable[RequestView]) -> None:
        """Age all open requests by another patience; what has aged stays so."""
        self._starvation_s = starvation_s
        self._instants = [(ages_at_s(one, starvation_s), one.request_id) for one in views]
        heapify(self._instants)

    def add(self, view: RequestView, num_open: int) -> None:
        """Watch one more of so many open requests."""
        heappush(self._instants, (ages_at_s(view, self._starvation_s), view.request_id))
        if len(self._instants) > 2 * num_open + _MOST_GONE:
            self._instants = [one for one in self._instants if self._find(one[1]) is not None]
            heapify(self._instants)

    def take(self, now_s: float) -> Iterator[str]:
        """Yield the ids of open requests that have waited too long, each once."""
        while self._instants and self._instants[0][0] <= now_s:
            _, request_id = heappop(self._instants)
            record = self._find(request_id)
            # its id may have been used again since
            if record is not None and ages_at_s(record.view, self._starvation_s) <= now_s:
                yield request_id
