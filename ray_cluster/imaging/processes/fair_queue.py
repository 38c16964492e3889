"""Jobs that wait for processes, taken in turn by client; knows no clocks, threads or processes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ray_cluster.errors import RayClusterError
from ray_cluster.policies.admission.fair_share import fits

JobT = TypeVar("JobT")

# what a waiting job counts for at least: it bounds their number, too
LEAST_JOB_BYTES = 256 << 10


class QueueFull(RayClusterError):
    """The jobs that wait hold as much as their client may hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[JobT]):
    """A job in the queue.

    Attributes:
        num_bytes: what it holds until it ends.
    """

    client: str
    job: JobT
    num_bytes: int


@dataclass(slots=True)
class _Client(Generic[JobT]):
    """What the queue knows of a client that has a job.

    Attributes:
        cost: of its jobs that have ended, from what the cheapest client had when it came.
    """

    cost: float
    waiting: deque[Entry[JobT]] = field(default_factory=deque)
    num_running: int = 0
    num_bytes: int = 0


class FairQueue(Generic[JobT]):
    """Decides which job runs next.

    The client goes first that has the fewest jobs running, then the one whose jobs have cost least.
    No client ever has all places: one stays free for whoever comes next.

    Args:
        num_places: jobs that may run at once.
        max_bytes: what jobs that wait or run may hold, which clients share
            (:func:`~ray_cluster.policies.admission.fair_share.fits`); None for no bound.
    """

    def __init__(self, num_places: int, max_bytes: int | None) -> None:
        self._num_free = num_places
        self._most_running = max(1, num_places - 1)
        self._max_bytes = max_bytes
        self._clients: dict[str, _Client[JobT]] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self._clients

    def put(self, client: str, job: JobT, num_bytes: int = 0) -> Entry[JobT]:
        """Add a job at the end of its client's.

        Raises:
            QueueFull: it would hold too much.
        """
        entry = Entry(client, job, max(num_bytes, LEAST_JOB_BYTES))
        known = self._clients.get(client)
        wanted = entry.num_bytes + (0 if known is None else known.num_bytes)
        others = (one.num_bytes for name, one in self._clients.items() if name != client)
        if self._max_bytes is not None and not fits(wanted, others, self._max_bytes):
            raise QueueFull(
                f"the jobs of one client that wait would hold {wanted} bytes, of "
                f"{self._max_bytes} that {len(self._clients) + (known is None)} clients share"
            )
        if known is None:
            cheapest = min((one.cost for one in self._clients.values()), default=0.0)
            known = self._clients[client] = _Client(cheapest)
        known.waiting.append(entry)
        known.num_bytes += entry.num_bytes
        return entry

    def take(self) -> Entry[JobT] | None:
        """Return the job that runs now; None where none may."""
        ready = [
            one
            for one in self._clients.values()
            if one.waiting and one.num_running < self._most_running
        ]
        if not ready or not self._num_free:
            return None
        first = min(ready, key=lambda one: (one.num_running, one.cost))
        first.num_running += 1
        self._num_free -= 1
        return first.waiting.popleft()

    def end(self, entry: Entry[JobT], cost: float) -> None:
        """Note that a job that was taken has ended, and what it has cost."""
        client = self._clients[entry.client]
        client.num_running -= 1
        client.cost += cost
        self._num_free += 1
        self._let_go(entry)

    def drop(self, entry: Entry[JobT]) -> None:
        """Forget a job that waits; does nothing for one that was taken."""
        client = self._clients.get(entry.client)
        if client is not None and entry in client.waiting:
            client.waiting.remove(entry)
            self._let_go(entry)

    def _let_go(self, entry: Entry[JobT]) -> None:
        client = self._clients[entry.client]
        client.num_bytes -= entry.num_bytes
        if not client.num_bytes:
            del self._clients[entry.client]
