"""The threads in which the job store is called: one for reads, one for writes.

A write waits for the disk, some milliseconds each. While it does, others queue up, and go as one
transaction: however many jobs come, there is one wait at a time. Reads never wait for writes.

Reads are taken in turn by client. Writes keep their order: none of a job's may overtake another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, ParamSpec, TypeVar, cast

from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.imaging.processes.fair_queue import Entry, FairQueue
from ray_cluster.jobs.store.sql_engine import JobStoreError, JobUnreadable, NothingWritten
from ray_cluster.jobs.store.sql_owner import JobStoreTaken
from ray_cluster.jobs.store.sql_store import SqlJobStore

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# with the store's own time-out it stays below that of the caller, who gets an answer
_TURN_S = 1.5
_MAX_TOGETHER = 100
# calls of one client that wait
_MOST_WAITING = 256
# the client of what the service does by itself, without that bound
_OWN = ""
# how often a store that fails is looked at without anybody asking
_PROBE_EVERY_S = 1.0

_RETRY_S = (0.1, 0.5, 2.0, 5.0)

Kind = Literal["read", "write"]


@dataclass(slots=True, eq=False)
class _Call:
    """One call of the store, until it is answered."""

    work: Callable[[], Any]
    end_s: float
    answer: asyncio.Future[Any]

    @property
    def is_late(self) -> bool:
        """Whether it is not to be begun any more."""
        return self.end_s < time.monotonic()

    def run(self) -> Any:
        """Return what the store returns, or an error if it is too late; in the store's thread."""
        return _busy() if self.is_late else self.work()

    def end(self, result: Any) -> None:
        """Answer with a result, or an error."""
        if self.answer.done():
            return
        if isinstance(result, BaseException):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class StoreThreads:
    """Owns the store's threads and the calls that wait for them; used on one event loop."""

    def __init__(self, store: SqlJobStore) -> None:
        self._store = store
        probe_reads, probe_writes = partial(store.find, "", ""), partial(_write_nothing, store)
        write = partial(_do_together, store)
        self._lanes: dict[Kind, _Lane] = {
            "read": _Lane("read", probe_reads, _do_each, at_once=1),
            "write": _Lane("write", probe_writes, write, at_once=_MAX_TOGETHER),
        }

    @property
    def is_failing(self) -> bool:
        """Whether reads or writes of the store fail."""
        return any(lane.is_failing for lane in self._lanes.values())

    def visit(self, client: str = _OWN) -> StoreVisit:
        """Return the store for a caller that begins to wait now."""
        return StoreVisit(self, client, time.monotonic() + _TURN_S)

    async def call(
        self, kind: Kind, work: Callable[[], T], end_s: float = math.inf, client: str = _OWN
    ) -> T:
        """Return what ``work`` returns of the store, once its turn has come.

        Args:
            end_s: instant of the monotonic clock after which it is not begun any more.
            client: which takes turns with others; by default the service itself.

        Raises:
            JobStoreError: it failed, and nothing is written; or too many of the client's wait.
        """
        return await self._lanes[kind].call(work, end_s, client)

    async def write_surely(self, what: str, work: Callable[[], object]) -> bool:
        """Write something however long that takes; False if another owns the store by now.

        Args:
            what: for the log.
        """
        failures = 0
        while True:
            try:
                await self.call("write", work)
                return True
            except JobStoreTaken:
                return False
            except JobStoreError as error:
                logger.error("%s is not written yet: %s", what, error)
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1

    async def close(self) -> None:
        """Do what waits, and close the store."""
        for lane in self._lanes.values():
            await lane.close()
        await asyncio.to_thread(self._store.close)


class StoreVisit:
    """The store for one caller that waits.

    Calls raise :class:`JobStoreUnavailable` if it fails or comes too late, or too many wait.
    """

    def __init__(self, threads: StoreThreads, client: str, end_s: float) -> None:
        self._threads = threads
        self._client = client
        self._end_s = end_s

    async def read(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a method of the store returns."""
        return await self._call("read", partial(function, *args, **kwargs), self._client)

    async def write(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a method of the store returns; when it raises, nothing is written."""
        return await self._call("write", partial(function, *args, **kwargs), _OWN)

    async def insert(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method that writes something new, and nothing if that is there.

        It is called again if nobody knows whether the first call has: only its answer may be lost.
        """
        try:
            return await self.write(function, *args, **kwargs)
        except JobStoreUnavailable as error:
            if is_refusal(error):
                raise
            try:
                return await self.write(function, *args, **kwargs)
            except JobStoreUnavailable:
                raise error from error.__cause__

    async def _call(self, kind: Kind, work: Callable[[], T], client: str) -> T:
        try:
            return await self._threads.call(kind, work, self._end_s, client)
        except JobStoreError as error:
            # clients are not to know where the store is
            raise JobStoreUnavailable("the job store cannot be read or written") from error


def is_refusal(error: BaseException) -> bool:
    """Whether a write that failed has certainly written nothing."""
    return isinstance(error.__cause__, NothingWritten | JobStoreTaken)


class _Lane:
    """One thread, and what waits for it.

    Args:
        probe: called to find out whether the store works again.
        do: returns what each of some calls returns, or its error; called in the thread.
        at_once: most calls that it is given.
    """

    def __init__(
        self,
        kind: Kind,
        probe: Callable[[], object],
        do: Callable[[Sequence[_Call]], list[Any]],
        *,
        at_once: int,
    ) -> None:
        self._kind = kind
        self._probe = probe
        self._do = do
        self._at_once = at_once
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"job-store-{kind}")
        # it keeps one place for whoever comes next, and bounds bytes, not calls
        self._queue: FairQueue[_Call] = FairQueue(at_once + 1, None)
        self._num_waiting: Counter[str] = Counter()
        self._working: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self.is_failing = False

    async def call(self, work: Callable[[], T], end_s: float, client: str) -> T:
        """See :meth:`StoreThreads.call`."""
        if client != _OWN and self._num_waiting[client] >= _MOST_WAITING:
            raise _busy()
        loop = asyncio.get_running_loop()
        call = _Call(work, end_s, loop.create_future())
        self._queue.put(client, call)
        self._num_waiting[client] += 1
        if self._working is None:
            self._working = loop.create_task(self._work())
        return cast(T, await call.answer)

    async def close(self) -> None:
        """Do what waits, and end the thread."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
        while self._working is not None:
            await self._working
        self._thread.shutdown()

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while entries := self._taken():
            batch = [entry.job for entry in entries]
            begun_s = time.monotonic()
            done = loop.run_in_executor(self._thread, self._do, batch)
            outcome: list[Any] | BaseException
            # an error of ours ends these calls, and no others
            (outcome,) = await asyncio.gather(done, return_exceptions=True)
            results = outcome if isinstance(outcome, list) else [outcome] * len(batch)
            self._note(results)
            cost = (time.monotonic() - begun_s) / len(batch)
            for entry, result in zip(entries, results, strict=True):
                self._queue.end(entry, cost)
                entry.job.end(result)
        self._working = None

    def _taken(self) -> list[Entry[_Call]]:
        """Take what is done next."""
        entries = list(islice(iter(self._queue.take, None), self._at_once))
        self._num_waiting -= Counter(entry.client for entry in entries)
        return entries

    def _note(self, results: Sequence[Any]) -> None:
        errors = [
            one
            for one in results
            if isinstance(one, JobStoreError) and not isinstance(one, JobUnreadable)
        ]
        if len(errors) < len(results):
            self.is_failing = False
        elif not self.is_failing:
            self.is_failing = True
            logger.error("a %s of jobs failed: %s", self._kind, errors[0])
            if self._probing is None:
                self._probing = asyncio.create_task(self._probe_until_it_works())

    async def _probe_until_it_works(self) -> None:
        while self.is_failing:
            await asyncio.sleep(_PROBE_EVERY_S)
            # its error is noted as any other's
            await asyncio.gather(self.call(self._probe, math.inf, _OWN), return_exceptions=True)
        logger.info("%ss of jobs work again", self._kind)
        self._probing = None


def _busy() -> NothingWritten:
    return NothingWritten("the job store is busy")


def _do_each(batch: Sequence[_Call]) -> list[Any]:
    results: list[Any] = []
    for call in batch:
        try:
            results.append(call.run())
        except JobStoreError as error:
            results.append(error)
        except Exception as error:
            logger.exception("a call of the job store has failed unexpectedly")
            results.append(error)
    return results


def _do_together(store: SqlJobStore, batch: Sequence[_Call]) -> list[Any]:
    """Write as one; where one of them fails, each for itself."""
    if sum(not call.is_late for call in batch) < 2:
        return _do_each(batch)
    has_begun = False
    try:
        with store.together():
            has_begun = True
            results = [call.run() for call in batch]
    except JobStoreError as error:
        return _do_each(batch) if has_begun else [error] * len(batch)
    except Exception:
        logger.exception("a call of the job store has failed unexpectedly")
        return _do_each(batch)
    return results


def _write_nothing(store: SqlJobStore) -> None:
    with store.together():
        pass
