"""What requests keep of a step for later ones: one store for all rows of an engine."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ray_cluster.engine.executor import Activations


@dataclass(frozen=True, slots=True)
class _Entry:
    step_index: int
    activations: Activations

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for row in self.activations for parts in row for part in parts)


class ActivationStore:
    """Keeps the activations of each request's last full step, within a number of bytes.

    It is a cache: what is not here is computed again from the latents with which that step began,
    which a request carries with it. So neither its size nor who else is in it changes an image, and
    a request that goes to another replica takes nothing of it along.

    Args:
        budget_bytes: most that it holds; None for no limit. What was used longest ago goes first.
    """

    def __init__(self, budget_bytes: int | None = None) -> None:
        self._budget_bytes = budget_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, request_id: str, step_index: int) -> Activations | None:
        """Return what a request kept of that very step; None if that is not here."""
        entry = self._entries.get(request_id)
        if entry is None or entry.step_index != step_index:
            return None
        self._entries.move_to_end(request_id)
        return entry.activations

    def put(self, request_id: str, step_index: int, activations: Activations) -> None:
        """Keep what a request made in a step, in the place of what it kept before."""
        self.drop(request_id)
        entry = _Entry(step_index, activations)
        self._entries[request_id] = entry
        self._num_bytes += entry.num_bytes
        if self._budget_bytes is not None:
            while self._num_bytes > self._budget_bytes:
                self.drop(next(iter(self._entries)))

    def drop(self, request_id: str) -> None:
        """Forget a request, if it is here."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._num_bytes -= entry.num_bytes
