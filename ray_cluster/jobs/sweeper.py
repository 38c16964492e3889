"""Forgets old jobs and images, and deletes the images that nobody wants any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial

from ray_cluster.config.sections import StorageSettings
from ray_cluster.jobs.store import JobStore, JobStoreError
from ray_cluster.jobs.store_threads import StoreThreads
from ray_cluster.protocol.jobs import Job
from ray_cluster.protocol.leases import LATE_WRITE_S
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError

logger = logging.getLogger(__name__)

_SWEEP_EVERY_S = 60.0
# of the time that the last sweep took: it looks at every image that there is
_SWEEP_REST = 50.0
_PURGE_AT_ONCE = 500


async def rest_after_sweep(started_s: float) -> None:
    """Sleep until the next sweep is due.

    Args:
        started_s: when the last one began, on the event loop's clock.
    """
    took_s = asyncio.get_running_loop().time() - started_s
    await asyncio.sleep(max(_SWEEP_EVERY_S, _SWEEP_REST * took_s))


class JobSweeper:
    """Keeps the stores of jobs and results within the age and size of the configuration.

    Args:
        wall_clock: Unix time in seconds; ages are told by it.
    """

    def __init__(
        self,
        threads: StoreThreads,
        store: JobStore,
        results: BlobStore,
        config: StorageSettings,
        wall_clock: Callable[[], float],
    ) -> None:
        self._threads = threads
        self._store = store
        self._results = results
        self._config = config
        self._wall_clock = wall_clock
        self._is_failing = False

    @property
    def is_failing(self) -> bool:
        """Whether the results could not be looked through the last time."""
        return self._is_failing

    def keep(self, config: StorageSettings) -> None:
        """Keep within other bounds, from the next sweep on."""
        self._config = config

    async def run(self) -> None:
        """Sweep now and again, for ever."""
        while True:
            started_s = asyncio.get_running_loop().time()
            try:
                await self._sweep()
                self._is_failing = False
            except (JobStoreError, BlobStoreError) as error:
                self._is_failing = isinstance(error, BlobStoreError)
                logger.error("old jobs and results are not forgotten: %s", error)
            await rest_after_sweep(started_s)

    async def _sweep(self) -> None:
        """Forget jobs and images that are older than the configuration says, or too many."""
        before_s = self._wall_clock() - self._config.retention_s
        purge = partial(self._store.purge, before_s, limit=_PURGE_AT_ONCE)
        while purged := await self._threads.call("write", purge):
            await self.delete_images(purged)
        most = self._config.max_results_mib
        max_bytes = None if most is None else most << 20
        sweep = partial(self._results.sweep, before_s=before_s, max_bytes=max_bytes)
        await asyncio.to_thread(sweep)

    async def delete_images(self, jobs: Iterable[Job]) -> None:
        """Delete what there is of these jobs' images, as far as the result store can be reached."""
        names = [name for job in jobs for request in job.requests for name in request.file_ids]
        try:
            await asyncio.to_thread(self._results.delete, names)
        except BlobStoreError as error:
            logger.warning("images of jobs that ended are left to the sweep: %s", error)

    async def delete_late_images(self, job: Job) -> None:
        """Delete what a replica was about to write when it heard that nobody wants it."""
        await asyncio.sleep(LATE_WRITE_S)
        await self.delete_images([job])
