"""The one waiting queue of a cell."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from ray_cluster.policies.ordering import QueueKey, queue_key
from ray_cluster.policies.types import RequestView


class WaitingQueue:
    """Waiting requests by model, each model's always in the queue's order."""

    def __init__(self) -> None:
        self._keys_by_model: dict[str, list[QueueKey]] = {}
        self._views: dict[str, RequestView] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._views.values())

    def add(self, view: RequestView) -> None:
        """Put a request at its place."""
        assert view.request_id not in self._views, f"{view.request_id} waits already"
        self._views[view.request_id] = view
        insort(self._keys_by_model.setdefault(view.model, []), queue_key(view))

    def remove(self, request_id: str) -> None:
        """Take a request out."""
        view = self._views.pop(request_id)
        keys = self._keys_by_model[view.model]
        del keys[bisect_left(keys, queue_key(view))]
        if not keys:
            del self._keys_by_model[view.model]

    def position(self, view: RequestView) -> int:
        """Return how many of the model's requests wait before this one."""
        return bisect_left(self._keys_by_model[view.model], queue_key(view))

    @property
    def models(self) -> tuple[str, ...]:
        """The models of which requests wait."""
        return tuple(self._keys_by_model)

    def has(self, model: str) -> bool:
        """Whether a request of the model waits."""
        return model in self._keys_by_model

    def count(self, model: str) -> int:
        """Return how many requests of the model wait."""
        return len(self._keys_by_model.get(model, ()))

    def first(self, model: str, count: int) -> tuple[RequestView, ...]:
        """Return the model's waiting requests, at most so many, the next one first."""
        return tuple(self._views[key[-1]] for key in self._keys_by_model.get(model, ())[:count])
