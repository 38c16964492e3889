"""What fetches and converts files of LoRAs: child processes that can be ended at it, or threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakValueDictionary

from ray_cluster.errors import InvalidRequest, RequestFailed
from ray_cluster.imaging.processes.worker_process import CoderProcess, Message, run_here
from ray_cluster.replica.lora_store.fetching import fetch_task

_FETCH = ("ray_cluster.replica.lora_store.fetching", "fetch_task")
_CONVERT = ("ray_cluster.replica.lora_store.tasks", "convert_task")
# the imports of the first one take some ten seconds on a busy machine
_MAX_CONVERT_S = 300.0
# fetchers that wait for the next job
_MOST_IDLE = 2
# of jobs and of their ends: more than are ever at work, as hanging ones hold theirs
_NUM_THREADS = 40


class LoraProcesses:
    """Several that fetch, and one that converts; each starts with its first job.

    A job that is cancelled, or takes too long, ends with its process.
    """

    def __init__(self) -> None:
        # not those of the event loop, which may be few
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="lora")
        self._idle: list[CoderProcess] = []
        self._converter: CoderProcess | None = None
        self._is_converting = asyncio.Lock()
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._running: set[CoderProcess] = set()

    def warm_up(self) -> None:
        """Start the process that converts: its imports take seconds."""
        if self._converter is None:
            self._converter = CoderProcess(*_CONVERT)

    async def fetch(self, job: Message, max_s: float) -> Message:
        """Run :func:`ray_cluster.replica.lora_store.fetching.fetch_task`.

        Raises:
            InvalidRequest, RequestFailed, ProcessDied: as of :meth:`CoderProcess.run`.
        """
        process = self._idle.pop() if self._idle else CoderProcess(*_FETCH)
        return await self._run(process, job, max_s, self._put_back)

    def _put_back(self, process: CoderProcess) -> None:
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(process)
        else:
            self._threads.submit(process.close)

    async def convert(self, job: Message, owner: str) -> Message:
        """Run :func:`ray_cluster.replica.lora_store.tasks.convert_task`, one at a time.

        Args:
            owner: whose it is; between two of one owner, others have a turn.

        Raises:
            InvalidRequest, RequestFailed, ProcessDied: as of :meth:`CoderProcess.run`.
        """
        async with self._turns.setdefault(owner, asyncio.Lock()), self._is_converting:
            self.warm_up()
            process, self._converter = self._converter, None
            assert process is not None
            return await self._run(process, job, _MAX_CONVERT_S, self._keep_converter)

    def _keep_converter(self, process: CoderProcess) -> None:
        self._converter = process

    async def _run(
        self,
        process: CoderProcess,
        job: Message,
        max_s: float,
        keep: Callable[[CoderProcess], None],
    ) -> Message:
        loop = asyncio.get_running_loop()
        self._running.add(process)
        is_whole = False
        try:
            reply = await loop.run_in_executor(self._threads, process.run, job, max_s)
            is_whole = True
        except (InvalidRequest, RequestFailed):
            # of the job, not of the process
            is_whole = True
            raise
        finally:
            self._running.discard(process)
            if is_whole:
                keep(process)
            else:
                process.kill()
                self._threads.submit(process.close)
        return reply

    def close(self) -> None:
        """End all processes."""
        for process in self._running:
            process.kill()
        for process in (*self._idle, *([self._converter] if self._converter else [])):
            process.close()
        self._idle.clear()
        self._converter = None
        self._threads.shutdown()


class LoraThreads:
    """Does the same in threads of a process that trusts what it fetches, and has the libraries.

    Args:
        making: held while models are made, which changes torch for the whole process meanwhile.
    """

    def __init__(self, making: threading.Lock) -> None:
        self._making = making

    def warm_up(self) -> None:
        """Nothing is to be started."""

    async def fetch(self, job: Message, _max_s: float) -> Message:
        """Run :func:`ray_cluster.replica.lora_store.fetching.fetch_task`.

        Raises:
            InvalidRequest, RequestFailed: as of :meth:`LoraProcesses.fetch`.
        """
        return await asyncio.to_thread(run_here, fetch_task, job)

    async def convert(self, job: Message, _owner: str) -> Message:
        """Run :func:`ray_cluster.replica.lora_store.tasks.convert`.

        Raises:
            InvalidRequest, RequestFailed: as of :meth:`LoraProcesses.convert`.
        """
        # not above: a store's own process needs no model libraries
        from ray_cluster.replica.lora_store.tasks import convert

        def alone() -> Message:
            with self._making:
                return run_here(convert, job)

        return await asyncio.to_thread(alone)

    def close(self) -> None:
        """Nothing is to be ended."""
