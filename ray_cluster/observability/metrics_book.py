"""The latest metrics of every process of a cell, the dead ones' counters included."""

from __future__ import annotations

from ray_cluster.observability.metrics_snapshot import Snapshot, lasting, merge

# dead processes told apart, so that one that was only silent is not counted twice
_MAX_DEAD = 200


class MetricsBook:
    """Keeps what processes have told of themselves; sums never fall when a process ends.

    Args:
        silence_s: seconds without news after which a process counts as dead.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._live: dict[str, tuple[Snapshot, float]] = {}
        self._dead: dict[str, Snapshot] = {}
        self._folded: Snapshot = ()

    def update(self, process_id: str, snapshot: Snapshot, now_s: float) -> None:
        """Take in a process's present metrics; it lives, whatever was thought of it."""
        self._dead.pop(process_id, None)
        self._live[process_id] = (snapshot, now_s)

    def merged(self, now_s: float, *own: Snapshot) -> Snapshot:
        """Return the sums over all processes, and those handed over."""
        for process_id, (snapshot, heard_s) in list(self._live.items()):
            if now_s - heard_s > self._silence_s:
                del self._live[process_id]
                self._dead[process_id] = lasting(snapshot)
        while len(self._dead) > _MAX_DEAD:
            oldest = next(iter(self._dead))
            self._folded = merge([self._folded, self._dead.pop(oldest)])
        live = (snapshot for snapshot, _ in self._live.values())
        return merge([self._folded, *self._dead.values(), *live, *own])
