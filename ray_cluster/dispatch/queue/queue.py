"""The one waiting queue of a cell."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from ray_cluster.policies.admission.load import (
    NO_LOAD,
    NUM_AMOUNTS,
    NUM_PLAIN,
    Floats,
    Load,
    amounts_of,
    load_of,
)
from ray_cluster.policies.leasing.ordering import QueueKey, queue_key
from ray_cluster.policies.types import RequestView

# beside deadlines, amounts
_NUM_ROWS = 1 + NUM_AMOUNTS
_NUM_PLAIN_ROWS = 1 + NUM_PLAIN
_FIRST_CAPACITY = 16


class _Lane:
    """The waiting requests of one model in the queue's order, with their loads.

    Deadlines and loads are one array, so that the sum over a part of ten thousand of them takes
    microseconds. Whole numbers up to 2**53 are exact there. The rows for add-ons and masks are left
    out until a request has some.
    """

    def __init__(self) -> None:
        self.keys: list[QueueKey] = []
        self._loads: Floats = np.zeros((_NUM_ROWS, _FIRST_CAPACITY))
        self._num_rows = _NUM_PLAIN_ROWS

    def add(self, key: QueueKey, load: Load, deadline_s: float) -> None:
        count, index = len(self.keys), bisect_left(self.keys, key)
        if count == self._loads.shape[1]:
            self._loads = np.concatenate([self._loads, np.zeros_like(self._loads)], axis=1)
        loads = self._loads[: self._num_rows]
        loads[:, index + 1 : count + 1] = loads[:, index:count]
        self.keys.insert(index, key)
        self._loads[0, index] = deadline_s
        self._put(index, load)

    def remove(self, key: QueueKey) -> None:
        count, index = len(self.keys), bisect_left(self.keys, key)
        del self.keys[index]
        loads = self._loads[: self._num_rows]
        loads[:, index : count - 1] = loads[:, index + 1 : count]

    def put(self, key: QueueKey, load: Load) -> None:
        self._put(bisect_left(self.keys, key), load)

    def _put(self, index: int, load: Load) -> None:
        if not load.is_plain:
            self._num_rows = _NUM_ROWS
        self._loads[1 : self._num_rows, index] = amounts_of(load)[: self._num_rows - 1]

    def load_of_first(self, count: int) -> Load:
        amounts = self._loads[1 : self._num_rows, :count]
        return Load(*(int(amount) for amount in amounts.sum(axis=1)))

    def behind(self, index: int) -> tuple[Floats, Floats]:
        loads = self._loads[:, index : len(self.keys)]
        return loads[1:], loads[0]


class _ModelQueue(Sequence[RequestView]):
    """A lane's requests; valid until the lane changes."""

    def __init__(self, keys: Sequence[QueueKey], views: Mapping[str, RequestView]) -> None:
        self._keys = keys
        self._views = views

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...

    @overload
    def __getitem__(self, index: slice) -> list[RequestView]: ...

    def __getitem__(self, index: int | slice) -> RequestView | list[RequestView]:
        if isinstance(index, slice):
            return [self._views[key[-1]] for key in self._keys[index]]
        return self._views[self._keys[index][-1]]


class WaitingQueue:
    """Waiting requests by model, each model's always in the queue's order."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._views: dict[str, RequestView] = {}

    def __len__(self) -> int:
        return len(self._views)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._views.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._views

    def add(self, view: RequestView) -> None:
        assert view.request_id not in self._views, f"{view.request_id} waits already"
        self._views[view.request_id] = view
        self._lanes.setdefault(view.model, _Lane()).add(
            queue_key(view), load_of(view), view.deadline_s
        )

    def remove(self, request_id: str) -> None:
        view = self._views.pop(request_id)
        lane = self._lanes[view.model]
        lane.remove(queue_key(view))
        if not lane.keys:
            del self._lanes[view.model]

    def replace(self, view: RequestView) -> None:
        """Replace a waiting request by one of the same place."""
        self._views[view.request_id] = view
        self._lanes[view.model].put(queue_key(view), load_of(view))

    def position(self, view: RequestView) -> int:
        """Return how many of the model's requests wait before this one, or would."""
        return bisect_left(self._keys(view.model), queue_key(view))

    def load_before(self, view: RequestView) -> Load:
        """Return the load that waits before a request, or would."""
        lane = self._lanes.get(view.model)
        return NO_LOAD if lane is None else lane.load_of_first(self.position(view))

    def behind(self, view: RequestView) -> tuple[Floats, Floats]:
        """Return what waits behind a request, or would: amounts [L, N] and deadlines [N].

        Valid until the queue changes.
        """
        lane = self._lanes.get(view.model) or _Lane()
        return lane.behind(bisect_right(lane.keys, queue_key(view)))

    def load(self, model: str) -> Load:
        lane = self._lanes.get(model)
        return NO_LOAD if lane is None else lane.load_of_first(len(lane.keys))

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._lanes)

    def has(self, model: str) -> bool:
        return model in self._lanes

    def count(self, model: str) -> int:
        return len(self._keys(model))

    def of_model(self, model: str) -> Sequence[RequestView]:
        """Return a view of the model's waiting requests, the next one first."""
        return _ModelQueue(self._keys(model), self._views)

    def _keys(self, model: str) -> Sequence[QueueKey]:
        lane = self._lanes.get(model)
        return () if lane is None else lane.keys
