"""Coder processes that share one queue; each starts with the first job that finds no other free."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.processes import coder_tasks
from ray_cluster.imaging.processes.fair_queue import Entry, FairQueue
from ray_cluster.imaging.processes.worker_process import (
    CoderProcess,
    JobTooLong,
    Message,
    ProcessDied,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# the second one in a fresh process: the first may have died of an earlier image
_ATTEMPTS = 2
_MOST_BY_DEFAULT = 4


@dataclass(frozen=True, slots=True, eq=False)
class Job(Generic[T]):
    """What a process is to do.

    Attributes:
        client: whose it is; jobs are taken in turn by client.
        num_bytes: what it holds while it waits.
        message: returns what the process is sent; called when it is this job's turn.
        max_s: seconds after which the process is ended.
        if_deadly: what the future raises if the process dies of the job, or is ended.
    """

    client: str
    num_bytes: int
    message: Callable[[], Message]
    result_of: Callable[[Message], T]
    max_s: float
    if_deadly: InvalidRequest | RequestFailed
    future: Future[T] = field(default_factory=Future)
    # what it writes to the log names the image of whoever called
    context: Context = field(default_factory=copy_context)


class CoderPool:
    """Runs jobs in coder processes, by turns of :class:`~.fair_queue.FairQueue`.

    A job costs its client the time that it has a process.

    Args:
        num_processes: at most.
        max_bytes: what jobs that wait or run may hold, which clients share; None for no bound.
        clock: seconds.
    """

    def __init__(
        self,
        num_processes: int,
        max_bytes: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._threads = ThreadPoolExecutor(num_processes, thread_name_prefix="image-coder")
        self._queue: FairQueue[Job[Any]] = FairQueue(num_processes, max_bytes)
        self._clock = clock
        self._changed = threading.Condition()
        self._idle: list[CoderProcess] = []
        self._processes: list[CoderProcess] = []
        self._is_closed = False

    @property
    def process_ids(self) -> list[int]:
        """Ids of the live processes."""
        with self._changed:
            return [process.pid for process in self._processes]

    def submit(self, job: Job[T]) -> Future[T]:
        """Run a job when its turn comes; a future that is cancelled before gives it up.

        Raises:
            QueueFull: its client has too much waiting.
        """
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the coder is closed")
            entry = self._queue.put(job.client, job, job.num_bytes)
            self._start_jobs()
        job.future.add_done_callback(lambda done: self._drop(entry) if done.cancelled() else None)
        return job.future

    def close(self) -> None:
        """Finish what was submitted and end the processes; harmless a second time."""
        with self._changed:
            self._is_closed = True
            self._changed.wait_for(lambda: self._queue.is_idle)
        self._threads.shutdown()
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._idle.clear()

    def _start_jobs(self) -> None:
        """Start what may run now; the lock is held."""
        while (entry := self._queue.take()) is not None:
            if not entry.job.future.set_running_or_notify_cancel():
                self._queue.end(entry, 0.0)
                continue
            started_s = self._clock()
            running = self._threads.submit(entry.job.context.run, self._run, entry.job)
            running.add_done_callback(partial(self._end, entry, started_s))

    def _end(self, entry: Entry[Job[Any]], started_s: float, done: Future[Any]) -> None:
        with self._changed:
            self._queue.end(entry, self._clock() - started_s)
            self._start_jobs()
            self._changed.notify_all()
        error = done.exception()
        if error is None:
            entry.job.future.set_result(done.result())
        else:
            entry.job.future.set_exception(error)

    def _drop(self, entry: Entry[Job[Any]]) -> None:
        with self._changed:
            self._queue.drop(entry)
            self._changed.notify_all()

    def _run(self, job: Job[T]) -> T:
        message = job.message()
        for _attempt in range(_ATTEMPTS):
            process = self._borrowed()
            try:
                reply = process.run(message, job.max_s)
            except ProcessDied as error:
                logger.warning("a job (%s) has no result: %s", message.header["task"], error)
                self._discard(process)
                if isinstance(error, JobTooLong):
                    break
            except (InvalidRequest, RequestFailed):
                self._give_back(process)
                raise
            else:
                self._give_back(process)
                return job.result_of(reply)
        raise job.if_deadly

    def _borrowed(self) -> CoderProcess:
        """Return a process that has no job; the queue sees to it that there are never too many."""
        with self._changed:
            if self._idle:
                return self._idle.pop()
        try:
            process = _start()
        except OSError as error:
            raise RequestFailed(
                f"no process that codes images can be started ({error}); send the request again, "
                "and tell the operator: the machine may be out of memory or processes.",
                "coding",
            ) from error
        with self._changed:
            self._processes.append(process)
        return process

    def _give_back(self, process: CoderProcess) -> None:
        with self._changed:
            self._idle.append(process)

    def _discard(self, process: CoderProcess) -> None:
        with self._changed:
            self._processes.remove(process)
        process.close()


def usual_num_processes() -> int:
    """Return how many processes a machine of so many cores has use for; two at least."""
    # with one alone, whoever has a job in it keeps all others waiting
    return max(2, min(_MOST_BY_DEFAULT, len(os.sched_getaffinity(0))))


def _start() -> CoderProcess:
    return CoderProcess(coder_tasks.__name__, coder_tasks.run_task.__name__)
