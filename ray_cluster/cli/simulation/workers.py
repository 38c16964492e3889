"""Worker processes for the parts of a simulation, with a progress bar."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from ray_cluster.cli.output import stderr
from ray_cluster.cli.service.signals import StopSignals
from ray_cluster.errors import ConfigError

MOST_PROCESSES = 256
# of prctl(2)
_DIE_WITH_PARENT = 1
_LINE_EVERY_S = 20.0


class Workers:
    """Worker processes for the length of a ``with`` block, which an interrupt or SIGTERM ends, too.

    Args:
        count: as many as there are cores if None.
    """

    def __init__(self, count: int | None = None) -> None:
        # torch and Ray are not forked: every process begins anew
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            count or os.cpu_count() or 1, context, initializer=_begin, initargs=(os.getpid(),)
        )
        self._signals = StopSignals()

    def __enter__(self) -> Workers:
        self._signals.__enter__()
        self._signals.arm()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            # a part may last for minutes, and nobody waits for it any more
            for process in multiprocessing.active_children():
                process.terminate()
        # without waiting its semaphores would be left to the system
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._signals.__exit__(kind, error, trace)

    def run(self, parts: Sequence[Callable[[], Any]], label: str) -> list[Any]:
        """Return every part's result, in the parts' order.

        Raises:
            ConfigError: a process died.
        """
        results: list[Any] = [None] * len(parts)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, TimeElapsedColumn(), console=stderr()) as progress:
            task, say = progress.add_task(label, total=len(parts)), _Lines(progress)
            places = {self._pool.submit(part): place for place, part in enumerate(parts)}
            try:
                for done in as_completed(places):
                    results[places[done]] = done.result()
                    progress.advance(task)
                    say(task)
            except BrokenProcessPool:
                raise ConfigError(
                    f"{label}: a process died, perhaps for want of memory; try --processes 1"
                ) from None
        return results


class _Lines:
    """Prints now and then how far a bar is, where none can be drawn, as in a log file."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._said_s = 0.0

    def __call__(self, task_id: TaskID) -> None:
        task, now_s = self._progress.tasks[task_id], self._progress.get_time()
        is_due = now_s >= self._said_s + _LINE_EVERY_S or task.finished
        if self._progress.console.is_terminal or not is_due:
            return
        self._said_s = now_s
        self._progress.console.print(
            f"{task.description}: {task.completed:.0f} of {task.total:.0f} after "
            f"{task.elapsed or 0:.0f} s",
            markup=False,
        )


def _begin(parent: int) -> None:
    """Prepare a worker: it logs no images, leaves Ctrl-C to its parent, and dies with it."""
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        # it was gone before that
        os._exit(1)
