"""Durable jobs in the dispatcher: accepted once, made whoever dies, ended once.

The store has a job from its acceptance to its purge. Progress is in memory alone; after a death
the store says which jobs are open, and the result store which of their images are done.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ray_cluster.config.sections.cell_wide import StorageConfig
from ray_cluster.config.sections.loras import LorasConfig
from ray_cluster.config.settings import Settings
from ray_cluster.dispatch.queue.due import AT_ONCE
from ray_cluster.dispatch.reports.metrics import JobCounts
from ray_cluster.dispatch.service import DispatchService, Keeper
from ray_cluster.errors import JobStoreUnavailable
from ray_cluster.jobs.controller import ControlService
from ray_cluster.jobs.creation import JobCreation
from ray_cluster.jobs.known_keys import KnownKeys
from ray_cluster.jobs.loras import LoraService
from ray_cluster.jobs.open_job import OpenJob, log_job_end
from ray_cluster.jobs.restoring import JobRestorer
from ray_cluster.jobs.store.ownership import Ownership
from ray_cluster.jobs.store.sql_engine import JobStoreError
from ray_cluster.jobs.store.sql_store import SqlJobStore
from ray_cluster.jobs.store.store_threads import StoreThreads
from ray_cluster.jobs.sweeper import InputSweeper, JobSweeper
from ray_cluster.jobs.views import JobViews, OpenJobs
from ray_cluster.jobs.watchers import JobWatchers
from ray_cluster.process.tasks import Tasks
from ray_cluster.protocol.jobs import (
    FINAL_STATES,
    Creation,
    Job,
    JobPage,
    JobQuery,
    JobView,
    client_of,
)
from ray_cluster.protocol.leases import Registration
from ray_cluster.protocol.outcomes import Deferred, Outcome
from ray_cluster.requests import ImageRequest
from ray_cluster.storage.blob_store import BlobStore
from ray_cluster.storage.inputs import InputStore

logger = logging.getLogger(__name__)

_RECONCILE_EVERY_S = 60.0
# a cancelled job is cancelled at once; its caller waits for it to be written, too
_WRITTEN_S = 2.0
_LOOK_EVERY_S = 0.5


class JobService:
    """Runs on one event loop beside the dispatch service that has the images made.

    Owns the open jobs, and the only threads that call the store. Every call may raise
    :class:`~ray_cluster.errors.JobStoreUnavailable`.

    Args:
        results: where replicas put the images.
        inputs: where gateways put what clients send.
        max_open_per_client: bound on a client's jobs that have not ended.
        wall_clock: Unix time in seconds; ages of jobs are measured by it.
        lora_sources: what sources of LoRAs may begin with.

    Attributes:
        ownership: of the store; before the start it is to be known which cell's dispatcher it is.
        on_restored: called once all jobs of an earlier dispatcher are restored.
    """

    def __init__(
        self,
        dispatch: DispatchService,
        store: SqlJobStore,
        results: BlobStore,
        inputs: InputStore,
        *,
        config: StorageConfig,
        max_open_per_client: int,
        wall_clock: Callable[[], float],
        lora_sources: Sequence[str] = LorasConfig().sources,
    ) -> None:
        self._dispatch = dispatch
        self._store = store
        self._results = results
        self._wall_clock = wall_clock
        self._open = OpenJobs()
        self._views = JobViews(self._open, dispatch)
        self._threads = StoreThreads(store)
        self.ownership = Ownership(store, self._threads)
        self._creation = JobCreation(
            dispatch, store, self._threads, self._open, self._keeper_of, wall_clock
        )
        self._creation.max_open = max_open_per_client
        self._restorer = JobRestorer(
            dispatch, results, self._keeper_of, self._end_if_done, wall_clock
        )
        self.on_restored: Callable[[], None] = lambda: None
        self._sweeper = JobSweeper(
            self._threads,
            store,
            results,
            config,
            spared=self._open,
            open_requests=self._open_requests,
            wall_clock=wall_clock,
        )
        self._input_sweeper = InputSweeper(
            inputs,
            self._open_requests,
            lambda: self._threads.call("write", store.beat),
            lambda: bool(store.newer),
            wall_clock,
        )
        self._watchers = JobWatchers(self._views.version, lambda one: self._views.view(one.job))
        self._tasks = Tasks()
        # images of jobs that have failed, still to be aborted
        self._useless: list[str] = []
        self._aborting: asyncio.Task[None] | None = None

        self.loras = LoraService(
            dispatch.loras,
            store,
            self._threads,
            on_change=dispatch.note_loras,
            wall_clock=wall_clock,
            sources=lora_sources,
        )
        self.control = ControlService(dispatch, store, self._threads, wall_clock)
        self.known_keys = KnownKeys(store, self._threads)

    def apply(self, settings: Settings) -> None:
        """Apply other settings from now on; open jobs stay open."""
        self.loras.apply(settings)
        self._creation.max_open = settings.limits.max_open_jobs_per_client
        self._sweeper.config = settings.storage

    async def start(self) -> None:
        """Own the store; restore workers, LoRAs and open jobs of an earlier dispatcher.

        Raises:
            JobStoreInUse: another dispatcher owns it.
        """
        await self.ownership.take()
        workers = await self._threads.call("read", self._store.workers)
        self._dispatch.remember(workers)
        await self.control.start(workers)
        await self.loras.start()
        jobs = await self._threads.call("read", self._store.unfinished)
        self._tasks.spawn(self._restore(self._opened(jobs)))
        self._tasks.spawn(self._sweeper.run())
        # not before the open jobs are known
        self._tasks.spawn(self._input_sweeper.run())
        self._tasks.spawn(self._reconcile())

    def _opened(self, jobs: Iterable[Job]) -> list[OpenJob]:
        open_jobs = [OpenJob(job, is_looked_up=False) for job in jobs]
        for one in open_jobs:
            one.inserted.set()
            self._open.add(one)
            self._dispatch.expect(request.request_id for request in one.pending)
        return open_jobs

    async def _restore(self, open_jobs: Sequence[OpenJob]) -> None:
        await self._restorer.restore(open_jobs)
        if not self._store.newer:
            # those of a later release may use what is removed
            self.loras.begin_sweeping()
        self.on_restored()

    async def _reconcile(self) -> None:
        """Have those jobs made that are open in the store alone, now and then."""
        while True:
            await asyncio.sleep(_RECONCILE_EVERY_S)
            try:
                ids = await self._threads.call("read", self._store.unfinished_ids)
                for job_id in [one for one in ids if self._is_strange(one)]:
                    job = await self._threads.call("read", partial(self._store.get, job_id))
                    if job is not None and not job.is_final and self._is_strange(job_id):
                        logger.error("job %s was open in the store alone: it is made", job_id)
                        await self._restorer.restore(self._opened([job]))
            except JobStoreError as error:
                logger.warning("open jobs are not compared with the store: %s", error)

    def _is_strange(self, job_id: str) -> bool:
        """Whether nobody here knows of a job."""
        is_known = job_id in self._open or job_id in self._store.newer
        return not is_known and not self._creation.is_doubtful(job_id)

    def _open_requests(self) -> Iterator[ImageRequest]:
        """Yield those that wait or are made, and all of the jobs that have not ended."""
        yield from self._dispatch.open_requests()
        for open_job in self._open:
            yield from open_job.job.requests

    def save_worker(self, registration: Registration) -> None:
        """Have a worker's registration written for later dispatchers; a failure is only logged."""
        if registration.pool:
            self.control.note_worker(registration)
            self._tasks.spawn(self._write_worker(registration))

    async def _write_worker(self, registration: Registration) -> None:
        write = partial(self._store.save_worker, registration, self._wall_clock())
        try:
            await self._threads.call("write", write)
        except JobStoreError as error:
            logger.warning("the worker of pool %s is not saved: %s", registration.pool, error)

    async def create_job(self, job: Job) -> Creation:
        """Accept a job, or find the one that its key named before, or refuse it.

        Once this returns an accepted job, it survives the death of every process.
        """
        self.check_not_handed_over()
        return await self._creation.create(job)

    def check_not_handed_over(self) -> None:
        """Raise JobStoreUnavailable once another cell has the jobs, or is to have them."""
        if self.ownership.is_leaving:
            raise JobStoreUnavailable(
                "a later Ray cluster has taken this service over: call again, and it answers"
            )

    async def hand_over(self) -> None:
        """Leave the jobs to another cell's dispatcher: none is accepted, made or written any more.

        What is being written as it ended is waited for; what is being made goes on there, from its
        last stored state. Calls that wait for images without a job are served to their end.
        """
        self.ownership.is_leaving = True
        await self._creation.close(_WRITTEN_S)
        ending = [one.stored.wait() for one in self._open if not one.pending and not one.is_void]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_WRITTEN_S):
                await asyncio.gather(*ending)
        left = list(self._open)
        for one in left:
            one.is_void = True
            self._open.remove(one)
        await self._tasks.close()
        self._watchers.close()
        ids = [request.request_id for one in left for request in one.pending]
        for begin in range(0, len(ids), AT_ONCE):
            await self._dispatch.leave(ids[begin : begin + AT_ONCE])
            await asyncio.sleep(0)
        self.control.leave()
        await self.ownership.hand_over()
        logger.warning("handed %d open jobs over to a later Ray cluster", len(left))

    async def job(self, client: str, job_id: str, wait_s: float = 0.0) -> JobView | None:
        """Return a client's job, once it has ended or ``wait_s`` are over; None for another's."""
        if (open_job := self._open.of(client_of(client), job_id)) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await open_job.stored.wait()
            if open_job.stored.is_set():
                # the same has just been written
                return JobView(open_job.job)
        job = await self._find(client, job_id)
        if job is None or job.client != client_of(client):
            return None
        if self.ownership.is_leaving and not job.is_final:
            # it is made elsewhere, and only the store tells of it
            await asyncio.sleep(min(wait_s, _LOOK_EVERY_S))
        return await self._as_ended(client, self._views.view(job))

    async def job_change(
        self, client: str, job_id: str, seen: str, wait_s: float
    ) -> JobView | None:
        """Return a client's job once its version is not ``seen``, or ``wait_s`` are over."""
        if (open_job := self._open.of(client_of(client), job_id)) is not None:
            view = await self._watchers.wait(open_job, seen, wait_s)
            if view is not None:
                return view
        return await self.job(client, job_id)

    async def _find(self, caller: str, job_id: str) -> Job | None:
        open_job = self._open.get(job_id)
        if open_job is not None:
            return open_job.job
        return await self._threads.visit(caller).read(self._store.get, job_id)

    async def jobs(self, query: JobQuery) -> JobPage:
        """Return a page of a client's jobs, the newest first."""
        caller, query = query.client, replace(query, client=client_of(query.client))
        if query.state in (None, *FINAL_STATES):
            # one more tells whether more follow
            more = replace(query, limit=query.limit + 1)
            page = await self._threads.visit(caller).read(self._store.page, more)
            shown = await self._views.page(page, query.limit)
            views = [await self._as_ended(caller, view) for view in shown.views]
            return replace(shown, views=tuple(views))
        # only the one that makes them knows which
        self.check_not_handed_over()
        last = None if query.after is None else await self._find(caller, query.after)
        if query.after is not None and (last is None or last.client != query.client):
            return JobPage((), has_more=False)
        return await self._views.open_page(query, last)

    async def _as_ended(self, caller: str, view: JobView) -> JobView:
        """Return a view of a job; as the job has ended, if it has since it was read."""
        if view.job.is_final or view.job.job_id in self._open:
            return view
        job = await self._threads.visit(caller).read(self._store.get, view.job.job_id)
        return view if job is None else JobView(job)

    async def cancel_job(self, client: str, job_id: str) -> JobView | None:
        """End a job now; one that has ended stays as it is."""
        self.check_not_handed_over()
        if (open_job := self._open.of(client_of(client), job_id)) is not None:
            ids = open_job.cancel()
            await self._dispatch.abort(ids)
            if ids and not open_job.is_looked_up:
                self._end_if_done(open_job)
            try:
                async with asyncio.timeout(_WRITTEN_S):
                    await open_job.stored.wait()
            except TimeoutError as error:
                raise JobStoreUnavailable("the job is cancelled, but not yet written so") from error
        return await self.job(client, job_id)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What keeps jobs from being made, for an operator; the log says more."""
        jobs = "the job store cannot be read or written: no job is accepted"
        results = "the result store cannot be read or written"
        inputs = "the store of images that clients send cannot be read or written"
        taken = "another dispatcher has taken the job store: this one ends"
        left = "a later Ray cluster has taken the jobs over: this one ends what it has begun"
        newer = f"{len(self._store.newer)} jobs of a later release are left alone"
        damaged = f"{self._store.num_damaged} damaged jobs are put aside: see table damaged_jobs"
        failing = {
            jobs: self._threads.is_failing,
            taken: self.ownership.is_lost,
            left: self.ownership.is_leaving,
            newer: self._store.newer,
            damaged: self._store.num_damaged,
            results: self._sweeper.is_failing or self._restorer.is_failing,
            inputs: self._input_sweeper.is_failing,
        }
        return tuple(text for text, is_failing in failing.items() if is_failing)

    @property
    def num_open(self) -> int:
        """How many jobs have not ended."""
        return len(self._open)

    @property
    def counts(self) -> JobCounts:
        """How many jobs are open, and how many cannot be read."""
        return JobCounts(len(self._open), self._store.num_damaged, len(self._store.newer))

    async def close(self) -> None:
        """Stop; open jobs stay open in the store."""
        self._watchers.close()
        await self.loras.close()
        await self._creation.close()
        await self._tasks.close()
        await self.ownership.release()
        await self._threads.close()

    def _keeper_of(self, open_job: OpenJob) -> Keeper:
        return partial(self._on_outcome, open_job)

    def _on_outcome(self, open_job: OpenJob, outcome: Outcome | Deferred) -> None:
        if open_job.is_void:
            # it may go on elsewhere
            return
        if isinstance(outcome, Deferred):
            open_job.note(outcome)
            self._tasks.spawn(self._write_deferred(open_job))
            return
        rest = open_job.take(outcome)
        if rest:
            self._useless.extend(rest)
            if self._aborting is None or self._aborting.done():
                self._aborting = self._tasks.spawn(self._abort_useless())
        self._end_if_done(open_job)

    async def _abort_useless(self) -> None:
        """Abort images of jobs that failed, many of which may have in one turn, in parts."""
        while self._useless:
            ids, self._useless = self._useless[:AT_ONCE], self._useless[AT_ONCE:]
            # an error in one part is not that of the others
            self._tasks.spawn(self._dispatch.abort(ids))
            await asyncio.sleep(0)

    def _end_if_done(self, open_job: OpenJob) -> None:
        if not open_job.pending and not open_job.is_void:
            self._tasks.spawn(self._write_end(open_job))

    async def _write_deferred(self, open_job: OpenJob) -> None:
        """Write a decision; without it a later dispatcher decides anew."""
        try:
            await self._threads.call("write", lambda: self._store.update(open_job.job))
        except JobStoreError as error:
            logger.warning("a deferral of job %s is not saved: %s", open_job.job.job_id, error)

    async def _write_end(self, open_job: OpenJob) -> None:
        """Write the end of a job; nobody sees it, and nothing is deleted, before it is written."""
        # its row is there, which may take a second attempt
        await open_job.inserted.wait()
        if open_job.is_void:
            return
        ended = open_job.ended(self._wall_clock())
        what = f"the end of job {ended.job_id}"
        if not await self._threads.write_surely(what, partial(self._store.update, ended)):
            return
        self._open.remove(open_job)
        open_job.job = ended
        open_job.stored.set()
        self._watchers.check(open_job)
        log_job_end(ended)
        await self._sweeper.delete_candidates(ended)
        if ended.state != "completed":
            await self._sweeper.delete_images([ended])
            self._tasks.spawn(self._sweeper.delete_late_images(ended))
