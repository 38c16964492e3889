"""Groups requests that can share a pipeline call; one thread works on one group at a time.

As ``serve.batch``, but grouped: a pipeline call has one size, one number of steps and one guidance
scale. The oldest request goes next, with those that can share its call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class Dropped(Exception):
    """The request could not be in time any more when its turn came."""


@dataclass(slots=True, eq=False)
class _Waiting(Generic[ItemT, ResultT]):
    item: ItemT
    since_s: float
    result: asyncio.Future[ResultT]


class Batcher(Generic[ItemT, ResultT]):
    """Lives on one event loop.

    Args:
        work: returns a result for each item of a group; called in a thread of its own.
        key_of: items with equal keys can share a call.
        max_batch: most items of a call.
        wait_s: for which an item waits for others while the thread is idle and its call not full.
        is_hopeless: whether to drop an item at a Unix time, before work.
        now: Unix time.
    """

    def __init__(
        self,
        work: Callable[[Sequence[ItemT]], Sequence[ResultT]],
        *,
        key_of: Callable[[ItemT], Hashable],
        max_batch: int,
        wait_s: float,
        is_hopeless: Callable[[ItemT, float], bool],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._work = work
        self._key_of = key_of
        self._max_batch = max_batch
        self._wait_s = wait_s
        self._is_hopeless = is_hopeless
        self._now = now
        self._waiting: list[_Waiting[ItemT, ResultT]] = []
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pipeline")
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def submit(self, item: ItemT) -> ResultT:
        """Return the item's result, in its turn.

        Raises:
            Dropped: it can no longer be in time; the work's own errors come as they are.
        """
        loop = asyncio.get_running_loop()
        waiting: _Waiting[ItemT, ResultT] = _Waiting(item, loop.time(), loop.create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.result

    async def close(self) -> None:
        """Stop, and cancel the items in the queue."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        for one in self._waiting:
            one.result.cancel()
        self._thread.shutdown()

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                await self._next_arrival(None)
            self._drop_hopeless()
            if not self._waiting:
                continue
            key = self._key_of(self._waiting[0].item)
            alike = [one for one in self._waiting if self._key_of(one.item) == key]
            group = alike[: self._max_batch]
            rest_s = group[0].since_s + self._wait_s - asyncio.get_running_loop().time()
            if len(group) < self._max_batch and rest_s > 0:
                await self._next_arrival(rest_s)
                continue
            self._waiting = [one for one in self._waiting if one not in group]
            await self._call(group)

    async def _next_arrival(self, timeout_s: float | None) -> None:
        self._arrived.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), timeout_s)

    def _drop_hopeless(self) -> None:
        now_s = self._now()
        for one in self._waiting:
            # of a client that has gone it is done already
            if not one.result.done() and self._is_hopeless(one.item, now_s):
                one.result.set_exception(Dropped())
        self._waiting = [one for one in self._waiting if not one.result.done()]

    async def _call(self, group: Sequence[_Waiting[ItemT, ResultT]]) -> None:
        loop = asyncio.get_running_loop()
        items = [one.item for one in group]
        try:
            results = await loop.run_in_executor(self._thread, self._work, items)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the callers' answer
            for one in group:
                if not one.result.done():
                    one.result.set_exception(error)
            return
        for one, result in zip(group, results, strict=True):
            if not one.result.done():
                one.result.set_result(result)
