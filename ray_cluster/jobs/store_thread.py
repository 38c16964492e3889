"""The one thread in which the job store is called: in the order of asking, writes together.

A write waits for the disk, some milliseconds each. While it does, others queue up, and go as one
transaction: however many jobs come, there is one wait at a time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, ParamSpec, TypeVar, cast

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.store import JobStore, JobStoreError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# with the store's own patience it stays below that of whoever asks: they hear what became of it
_TURN_S = 1.0
_MAX_TOGETHER = 100


Kind = Literal["read", "write"]


@dataclass(slots=True, eq=False)
class _Call:
    """One call of the store, until it is answered."""

    kind: Kind
    work: Callable[[], Any]
    end_s: float
    answer: asyncio.Future[Any]

    def attempt(self) -> Any:
        """Return what the store returns, or its error; in the store's thread."""
        if self.end_s < time.monotonic():
            return JobStoreError("the job store is busy")
        try:
            return self.work()
        except JobStoreError as error:
            return error

    def end(self, result: Any) -> None:
        """Answer with a result, or an error."""
        if self.answer.done():
            return
        if isinstance(result, BaseException):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class StoreThread:
    """Owns the store's thread and the calls that wait for it; used on one event loop."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="job-store")
        self._waiting: deque[_Call] = deque()
        self._working: asyncio.Task[None] | None = None
        self._failing: set[Kind] = set()

    @property
    def is_failing(self) -> bool:
        """Whether the last read or the last write of the store failed."""
        return bool(self._failing)

    def visit(self) -> StoreVisit:
        """Return the calls of somebody who begins to wait now."""
        return StoreVisit(self, time.monotonic() + _TURN_S)

    async def call(self, kind: Kind, work: Callable[[], T], end_s: float = math.inf) -> T:
        """Return what ``work`` returns of the store, once its turn has come.

        Args:
            end_s: instant of the monotonic clock after which it is not begun any more.

        Raises:
            JobStoreError: it failed, and nothing is written.
        """
        loop = asyncio.get_running_loop()
        call = _Call(kind, work, end_s, loop.create_future())
        self._waiting.append(call)
        if self._working is None:
            self._working = loop.create_task(self._work())
        return cast(T, await call.answer)

    async def close(self) -> None:
        """Do what waits, and close the store."""
        while self._working is not None:
            await self._working
        await asyncio.get_running_loop().run_in_executor(self._thread, self._store.close)
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch = self._next_batch()
            done = loop.run_in_executor(self._thread, _do, self._store, batch)
            outcome: list[Any] | BaseException
            # an error of ours ends these calls, and no others
            (outcome,) = await asyncio.gather(done, return_exceptions=True)
            results = outcome if isinstance(outcome, list) else [outcome] * len(batch)
            self._note(batch[0].kind, results)
            for call, result in zip(batch, results, strict=True):
                call.end(result)
        self._working = None

    def _next_batch(self) -> list[_Call]:
        """Take one read, or the writes that follow upon each other."""
        batch = [self._waiting.popleft()]
        while (
            self._waiting
            and len(batch) < _MAX_TOGETHER
            and self._waiting[0].kind == batch[0].kind == "write"
        ):
            batch.append(self._waiting.popleft())
        return batch

    def _note(self, kind: Kind, results: Sequence[Any]) -> None:
        errors = [result for result in results if isinstance(result, JobStoreError)]
        if len(errors) < len(results):
            self._failing.discard(kind)
        elif kind not in self._failing:
            logger.error("a %s failed: %s", kind, errors[0])
            self._failing.add(kind)


class StoreVisit:
    """The calls of somebody who waits: all in time, or told that the store is away.

    Each raises :class:`JobStoreUnavailable` where the store failed or is late.
    """

    def __init__(self, thread: StoreThread, end_s: float) -> None:
        self._thread = thread
        self._end_s = end_s

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a method of the store returns."""
        return await self._call("read", partial(function, *args, **kwargs))

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a method of the store returns; when it raises, nothing is written."""
        return await self._call("write", partial(function, *args, **kwargs))

    async def _call(self, kind: Kind, work: Callable[[], T]) -> T:
        try:
            return await self._thread.call(kind, work, self._end_s)
        except JobStoreError as error:
            # whoever calls from outside is not to know where the store is
            raise JobStoreUnavailable("the job store cannot be read or written") from error


def _do(store: JobStore, batch: Sequence[_Call]) -> list[Any]:
    """Return what each call returns, or its error; in the store's thread."""
    if len(batch) == 1:
        return [batch[0].attempt()]
    try:
        with store.together():
            results = [call.attempt() for call in batch]
    except JobStoreError as error:
        return [error] * len(batch)
    return results
