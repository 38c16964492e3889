"""The thread of one stage: single pieces of work first, then the stage's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ray_cluster.engine.device.streams import StageStream

T = TypeVar("T")


class StageThread:
    """Runs everything of a stage in one thread and one stream.

    Handles of libraries, their workspaces and the plans of convolutions belong to a thread and its
    stream: what :meth:`call` warms up is warm in the loop.

    Args:
        loop: the stage's own; :meth:`start` lets it begin.
        on_error: called with what ended the loop.
        num_threads: torch threads.
    """

    def __init__(
        self,
        name: str,
        loop: Callable[[], None],
        stream: StageStream,
        *,
        on_error: Callable[[str, Exception], None],
        num_threads: int,
    ) -> None:
        self.name = name
        self._loop = loop
        self._stream = stream
        self._on_error = on_error
        self._num_threads = num_threads
        # None lets the loop begin
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def call(self, work: Callable[[], T]) -> T:
        """Run something in the thread before its loop begins, and return or raise what it does.

        What it has queued on a device is done then.
        """
        future: Future[T] = Future()
        self._calls.put(lambda: self._carry_out(work, future))
        self._begin()
        return future.result()

    def start(self) -> None:
        """Let the loop begin."""
        self._calls.put(None)
        self._begin()

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, whose loop must have been told to end."""
        if self._thread.ident is not None:
            self._calls.put(None)
            self._thread.join(timeout_s)

    def _begin(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _carry_out_calls(self) -> None:
        for call in iter(self._calls.get, None):
            call()

    def _carry_out(self, work: Callable[[], Any], future: Future[Any]) -> None:
        try:
            result = work()
            self._stream.synchronize()
        # whoever called is to have it, whatever it is
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)
        else:
            future.set_result(result)

    def _run(self) -> None:
        # all three settings are per thread
        torch.set_num_threads(self._num_threads)
        try:
            with torch.inference_mode(), self._stream.running():
                self._carry_out_calls()
                self._loop()
        except Exception as error:
            self._on_error(self.name, error)
            raise
