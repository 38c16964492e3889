"""Deletes old jobs, their images, and images that clients have sent and nobody needs any more."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator
from functools import partial

from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.dispatch.stages import stages_of
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import StoreThreads
from ray_cluster.process.turns import in_parts
from ray_cluster.protocol.jobs import Job
from ray_cluster.protocol.leases import LATE_WRITE_S
from ray_cluster.requests import ImageRequest, candidate_name
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError
from ray_cluster.storage.inputs import InputStore, input_names

logger = logging.getLogger(__name__)

_SWEEP_EVERY_S = 60.0
# of the time that the last sweep took: it looks at every image that there is
_SWEEP_REST = 50.0
_PURGE_AT_ONCE = 500
# requests whose inputs are looked up before others have their turn
_NAMED_AT_ONCE = 500
# of an image of an earlier stage whose request nobody has: its dispatcher died
_LEFT_S = 600.0


class Sweeper(ABC):
    """Sweeps again and again.

    Attributes:
        is_failing: whether the blobs could not be swept the last time.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self.is_failing = False

    @abstractmethod
    async def sweep(self) -> None:
        """Delete what is old; raises JobStoreError or BlobStoreError."""

    async def run(self) -> None:
        """Sweep for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            started_s = clock()
            try:
                await self.sweep()
                self.is_failing = False
            except (JobStoreError, BlobStoreError) as error:
                self.is_failing = isinstance(error, BlobStoreError)
                logger.error("%s are not deleted: %s", self._what, error)
            except Exception:
                # a mistake of ours, or a row that nobody has thought of: the next sweep comes
                logger.exception("%s are not deleted", self._what)
            await asyncio.sleep(max(_SWEEP_EVERY_S, _SWEEP_REST * (clock() - started_s)))


class JobSweeper(Sweeper):
    """Bounds the age and the size of the stores of jobs and results, as configured.

    Args:
        spared: jobs that are whole in memory, however their rows are.
        open_requests: returns every request of the cell that has not ended.
        wall_clock: Unix time in seconds; ages are measured by it.
    """

    def __init__(
        self,
        threads: StoreThreads,
        store: SqlJobStore,
        results: BlobStore,
        config: StorageConfig,
        *,
        spared: Container[str],
        open_requests: Callable[[], Iterable[ImageRequest]],
        wall_clock: Callable[[], float],
    ) -> None:
        super().__init__("old jobs and results")
        self._threads = threads
        self._store = store
        self._results = results
        self._wall_clock = wall_clock
        self._spared = spared
        self._open_requests = open_requests
        self.config = config

    async def sweep(self) -> None:
        """Delete jobs and images that are older than the configuration says, or too many."""
        before_s = self._wall_clock() - self.config.retention_s
        # which says, too, whether the store is still this dispatcher's: what is not is not swept
        put_aside = partial(self._store.put_aside, self._wall_clock(), self._spared)
        await self._threads.call("write", put_aside)
        purge = partial(self._store.purge, before_s, limit=_PURGE_AT_ONCE)
        while purged := await self._threads.call("write", purge):
            await self.delete_images(purged)
        most = self.config.max_results_mib
        max_bytes = None if most is None else most << 20
        sweep = partial(self._results.sweep, before_s=before_s, max_bytes=max_bytes)
        await asyncio.to_thread(sweep)
        await self._sweep_candidates()

    async def _sweep_candidates(self) -> None:
        """Delete images of earlier stages whose requests no dispatcher has any more."""
        before_s = self._wall_clock() - _LEFT_S
        old = await asyncio.to_thread(lambda: list(self._candidates(before_s)))
        if not old or self._store.newer:
            # jobs of a later release may go on with theirs
            return
        # no image that is asked for later has an old candidate
        kept: set[str] = set()
        async for one in in_parts(list(self._open_requests()), _NAMED_AT_ONCE):
            kept.add(one.request_id)
        await asyncio.to_thread(
            self._results.delete, [name for name, owner in old if owner not in kept]
        )

    def _candidates(self, before_s: float) -> Iterator[tuple[str, str]]:
        """Yield the names of old ones, each with the id of its request."""
        for blob in self._results.entries():
            request_id, mark, _stage = blob.name.partition(candidate_name(""))
            if mark and blob.changed_s < before_s:
                yield blob.name, request_id

    async def delete_images(self, jobs: Iterable[Job]) -> None:
        """Delete what there is of these jobs' images, as far as the result store can be reached."""
        await self._delete(name for job in jobs for one in job.requests for name in one.file_ids)

    async def delete_candidates(self, job: Job) -> None:
        """Delete images of earlier stages: a dispatcher may have died before it did."""
        await self._delete(
            candidate_name(one.request_id, stage)
            for one in job.requests
            for stage in range(len(stages_of(one).specs) - 1)
        )

    async def _delete(self, names: Iterable[str]) -> None:
        found = list(names)
        if not found:
            return
        try:
            await asyncio.to_thread(self._results.delete, found)
        except BlobStoreError as error:
            logger.warning("images of jobs that ended are left to the sweep: %s", error)

    async def delete_late_images(self, job: Job) -> None:
        """Delete what a replica was about to write when it heard that nobody wants it."""
        await asyncio.sleep(LATE_WRITE_S)
        await self.delete_candidates(job)
        await self.delete_images([job])


class InputSweeper(Sweeper):
    """Deletes images that clients sent, unless open requests name them or they are recent.

    A request that is accepted later names recent inputs: the grace age is at least twice the time
    that a call may take to arrive.

    Args:
        open_requests: returns every request of the cell that has not ended; called on the event
            loop. Not to be used before the jobs of an earlier dispatcher are among them.
        check_owner: raises JobStoreError if they may be another dispatcher's.
        knows_too_little: whether there are others, which only a later release can read.
        wall_clock: Unix time in seconds.
    """

    def __init__(
        self,
        inputs: InputStore,
        open_requests: Callable[[], Iterable[ImageRequest]],
        check_owner: Callable[[], Awaitable[object]],
        knows_too_little: Callable[[], bool],
        wall_clock: Callable[[], float],
    ) -> None:
        super().__init__("images that clients have sent")
        self._inputs = inputs
        self._open_requests = open_requests
        self._check_owner = check_owner
        self._knows_too_little = knows_too_little
        self._wall_clock = wall_clock

    async def sweep(self) -> None:
        """Delete old inputs that no open request names."""
        await self._check_owner()
        # read before the requests are: what is accepted after it names younger inputs
        sent_before_s = self._wall_clock() - self._inputs.grace_s
        if self._knows_too_little():
            return
        keep: set[str] = set()
        async for one in in_parts(list(self._open_requests()), _NAMED_AT_ONCE):
            keep |= input_names([one])
        await asyncio.to_thread(self._inputs.sweep, sent_before_s=sent_before_s, keep=keep)
