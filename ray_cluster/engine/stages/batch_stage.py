"""A stage that works in batches on what has arrived; an error costs only its own item."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from ray_cluster.engine.batch.batch_caps import BatchLimit
from ray_cluster.engine.device.device_errors import raise_if_broken
from ray_cluster.errors import REQUEST_ERRORS

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class BatchStage(Generic[ItemT, ResultT]):
    """Takes items from its queue, groups them, works on each group and hands results on.

    What is urgent goes first. The rest is worked on while nothing urgent waits, in small batches,
    and the oldest of it is dropped when there is too much.

    Args:
        is_wanted: items for which it is false are dropped.
        work: maps items of one group to one result each.
        group_of: items of different groups are never worked on together.
        on_done: called with each item and its result.
        on_error: called with an item whose work raised when it was tried alone.
        max_batch: most items in one group; a quarter of it for what is not urgent.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        is_wanted: Callable[[ItemT], bool],
        work: Callable[[Sequence[ItemT]], Sequence[ResultT]],
        group_of: Callable[[ItemT], Hashable],
        on_done: Callable[[ItemT, ResultT], None],
        on_error: Callable[[ItemT, Exception], None],
        max_batch: BatchLimit,
        clock: Callable[[], float],
    ) -> None:
        self._is_wanted = is_wanted
        self._work = work
        self._group_of = group_of
        self._on_done = on_done
        self._on_error = on_error
        self._max_batch = max_batch
        self._clock = clock
        self._busy_since_s: float | None = None
        self._changed = threading.Condition()
        self._urgent: deque[ItemT] = deque()
        self._rest: deque[ItemT] = deque(maxlen=max_batch.most)
        self._is_closed = False

    @property
    def silence_s(self) -> float:
        """Seconds that the stage has been at its present piece of work; 0 while it waits."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def put(self, item: ItemT, *, is_urgent: bool = True) -> None:
        """Queue an item; from any thread."""
        with self._changed:
            (self._urgent if is_urgent else self._rest).append(item)
            self._changed.notify()

    def close(self) -> None:
        """End :meth:`run` once it has worked on what is queued and urgent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def run(self) -> None:
        """Work until closed; the body of the stage's thread.

        Raises:
            DeviceBroken: no later piece of work can succeed in this process.
        """
        # no local of this loop may keep an item alive while the stage waits for the next
        while self._work_off(self._next()):
            self._busy_since_s = None

    def _work_off(self, items: Sequence[ItemT]) -> bool:
        groups: dict[Hashable, list[ItemT]] = {}
        for item in items:
            groups.setdefault(self._group_of(item), []).append(item)
        for group in groups.values():
            self._process([item for item in group if self._is_wanted(item)])
        return bool(items)

    def _next(self) -> list[ItemT]:
        """Wait for an item and take what else is there; nothing when closed."""
        with self._changed:
            while not (self._urgent or self._rest or self._is_closed):
                self._changed.wait()
            if self._urgent:
                return _take(self._urgent, self._max_batch.most)
            if self._is_closed:
                return []
            return _take(self._rest, max(1, self._max_batch.most // 4))

    def _process(self, items: Sequence[ItemT]) -> None:
        if not items:
            return
        self._busy_since_s = self._clock()
        try:
            results = self._work(items)
        except REQUEST_ERRORS as error:
            raise_if_broken(error)
            # the traceback holds the tensors of the failed call
            failure = error.with_traceback(None)
        else:
            for item, result in zip(items, results, strict=True):
                self._on_done(item, result)
            return
        if len(items) == 1:
            self._on_error(items[0], failure)
            return
        for item in items:
            self._process([item])


def _take(queue: deque[ItemT], most: int) -> list[ItemT]:
    return [queue.popleft() for _ in range(min(most, len(queue)))]
