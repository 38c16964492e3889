"""New jobs: accepted and written, or refused and certainly not written."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from weakref import WeakValueDictionary

from ray_cluster.dispatch.service import DispatchService, Keeper
from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.open_job import OpenJob, log_job
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import StoreThreads, StoreVisit, is_refusal
from ray_cluster.jobs.views import JobViews, OpenJobs
from ray_cluster.policies.types import Offer
from ray_cluster.process.tasks import Tasks
from ray_cluster.protocol.jobs import Creation, Job
from ray_cluster.requests import granted

logger = logging.getLogger(__name__)

_MOST_DOUBTFUL = 100
_WITHDRAWN_S = 2.0


class JobCreation:
    """Creates jobs of a cell.

    Args:
        keeper_of: returns who hears of the images of a job.

    Attributes:
        max_open: bound on a caller's jobs that have not ended; settings change it.
    """

    def __init__(
        self,
        dispatch: DispatchService,
        store: SqlJobStore,
        threads: StoreThreads,
        open_jobs: OpenJobs,
        keeper_of: Callable[[OpenJob], Keeper],
        wall_clock: Callable[[], float],
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._threads = threads
        self._open = open_jobs
        self._views = JobViews(open_jobs, dispatch)
        self._keeper_of = keeper_of
        self._wall_clock = wall_clock
        self.max_open = 0
        # while a call looks for its key and takes it, nobody else may take it
        self._keyed: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        # jobs that are refused, and may be in the store, until they certainly are not
        self._doubtful: dict[str, Job] = {}
        self._tasks = Tasks()

    async def create(self, job: Job) -> Creation:
        """See :meth:`.JobService.create_job`."""
        # whoever called may be gone by now: a job is accepted whole or not at all
        making = self._tasks.spawn(self._create_once(job, self._threads.visit(job.caller)))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            if making.cancelled():
                raise JobStoreUnavailable("this dispatcher ends: the job is not accepted") from None
            making.add_done_callback(_log_failure)
            raise

    def is_doubtful(self, job_id: str) -> bool:
        """Whether a job is refused, and may yet be in the store."""
        return job_id in self._doubtful

    async def close(self, patience_s: float = 0.0) -> None:
        """Stop; what can be withdrawn is, once more.

        Args:
            patience_s: longest wait for calls that have begun.
        """
        if len(self._tasks):
            await asyncio.wait([*self._tasks], timeout=patience_s)
        await self._tasks.close()
        # what these have left in doubt
        await self._tasks.close()
        left = [
            self._threads.call("write", partial(self._store.withdraw, one))
            for one in self._doubtful.values()
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WITHDRAWN_S):
                await asyncio.gather(*left, return_exceptions=True)

    async def _create_once(self, job: Job, visit: StoreVisit) -> Creation:
        if job.idempotency_key is None:
            return await self._create(job, visit)
        named = (job.client, job.idempotency_key)
        async with self._keyed.setdefault(named, asyncio.Lock()):
            for one in [*self._doubtful.values()]:
                if (one.client, one.idempotency_key) == named:
                    await visit.write(self._store.withdraw, one)
                    self._doubtful.pop(one.job_id, None)
            earlier = await visit.read(self._store.find, *named)
            if self._store.has_damaged:
                # which may have the key
                await visit.write(self._store.put_aside, self._wall_clock(), self._open)
            if earlier is not None:
                return Creation(self._views.view(earlier), False, Offer(accepted=True))
            return await self._create(job, visit)

    async def _create(self, job: Job, visit: StoreVisit) -> Creation:
        if self._open.count(job.caller) >= self.max_open:
            log_job("images_refused", job, num_images=len(job.requests), reason="too_many_jobs")
            return Creation(None, False, Offer(accepted=False, reason="too_many_jobs"))
        if len(self._doubtful) >= _MOST_DOUBTFUL:
            raise JobStoreUnavailable("too many jobs are yet to be withdrawn")
        open_job = OpenJob(job)
        offer = await self._dispatch.offer_durable(job.requests, self._keeper_of(open_job))
        if not offer.accepted:
            return Creation(None, False, offer)
        # what is written is what will be made, by this dispatcher or the next one
        job = replace(job, requests=granted(job.requests, offer.num_steps))
        open_job.job = job
        self._open.add(open_job)
        try:
            await visit.insert(self._store.insert, job)
        except BaseException as error:
            open_job.is_void = True
            self._open.remove(open_job)
            if not is_refusal(error):
                self._doubtful[job.job_id] = job
                self._tasks.spawn(self._withdraw(job))
            await self._dispatch.abort([request.request_id for request in job.requests])
            raise
        finally:
            open_job.inserted.set()
        log_job("job_accepted", job, num_images=len(job.requests))
        # admission has just predicted the same
        return Creation(self._views.view(job, predicted_s=offer.predicted_s), True, offer)

    async def _withdraw(self, job: Job) -> None:
        """See to it that a job that is refused is not in the store, either."""
        what = f"that job {job.job_id} was refused"
        await self._threads.write_surely(what, partial(self._store.withdraw, job))
        self._doubtful.pop(job.job_id, None)


def _log_failure(making: asyncio.Task[Creation]) -> None:
    """Fetch the error of a job whose caller has left."""
    if not making.cancelled() and (error := making.exception()) is not None:
        logger.warning("a job whose caller has left is not made: %s", error)
