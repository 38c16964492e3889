"""The open jobs of a cell, and jobs as their clients see them, page by page.

A page holds up the event loop for no longer than some of its jobs take: it is put together in
parts, and holds no more than one message should.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from ray_cluster.dispatch.predictions import Predicts
from ray_cluster.dispatch.service import DispatchService
from ray_cluster.jobs.open_job import OpenJob
from ray_cluster.jobs.page_size import PageSize
from ray_cluster.process.turns import in_parts
from ray_cluster.protocol.jobs import Job, JobPage, JobQuery, JobState, JobView

# jobs that are looked at before others have their turn
_AT_ONCE = 20
# jobs of a page whose ends are predicted anew; of others it says what is known
_MOST_PREDICTED = 4


class OpenJobs:
    """The jobs that have not ended, by id, by client, and counted by who called."""

    def __init__(self) -> None:
        self._by_id: dict[str, OpenJob] = {}
        self._by_client: dict[str, dict[str, OpenJob]] = {}
        self._num_of_caller: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._by_id

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._by_id.values())

    def get(self, job_id: str) -> OpenJob | None:
        return self._by_id.get(job_id)

    def of(self, client: str, job_id: str) -> OpenJob | None:
        """Return a client's job; None for another's."""
        return self._by_client.get(client, {}).get(job_id)

    def count(self, caller: str) -> int:
        return self._num_of_caller[caller]

    def of_client(self, client: str) -> Iterable[OpenJob]:
        return self._by_client.get(client, {}).values()

    def add(self, open_job: OpenJob) -> None:
        job = open_job.job
        self._by_id[job.job_id] = self._by_client.setdefault(job.client, {})[job.job_id] = open_job
        self._num_of_caller[job.caller] += 1

    def remove(self, open_job: OpenJob) -> None:
        job = open_job.job
        if self._by_id.pop(job.job_id, None) is not None:
            mine = self._by_client[job.client]
            del mine[job.job_id]
            self._num_of_caller[job.caller] -= 1
            if not self._num_of_caller[job.caller]:
                del self._num_of_caller[job.caller]
            if not mine:
                del self._by_client[job.client]


class JobViews:
    """Shows jobs as they are.

    Args:
        dispatch: knows how far their images are.
    """

    def __init__(self, open_jobs: OpenJobs, dispatch: DispatchService) -> None:
        self._open = open_jobs
        self._dispatch = dispatch

    def view(
        self, job: Job, *, predicts: Predicts = "anew", predicted_s: float | None = None
    ) -> JobView:
        """Return a job as it is.

        Args:
            predicted_s: what has just been predicted; nothing is predicted again.
        """
        open_job = self._open.get(job.job_id)
        if open_job is None:
            return JobView(job)
        ids = [request.request_id for request in job.requests]
        predicts = predicts if predicted_s is None else "no"
        progress = self._dispatch.progress(ids, predicts=predicts)
        if predicted_s is not None:
            progress = tuple(one and replace(one, predicted_s=predicted_s) for one in progress)
        state: JobState = "running" if self._is_running(open_job) else "queued"
        return JobView(replace(open_job.job, state=state), progress, open_job.num_made)

    def version(self, open_job: OpenJob) -> str:
        """Return a job's version, without any prediction."""
        return self.view(open_job.job, predicts="no").version

    def _is_running(self, open_job: OpenJob) -> bool:
        pending = open_job.pending
        if len(pending) < len(open_job.job.requests):
            return True
        return self._dispatch.has_begun([request.request_id for request in pending])

    async def open_page(self, query: JobQuery, last: Job | None) -> JobPage:
        """Return a page of a client's jobs in a state that is not the last one.

        Args:
            last: of the page before.
        """
        mine = self._open.of_client(query.client)
        jobs = sorted(mine, key=lambda one: one.job.rank, reverse=True)
        if last is not None:
            jobs = [one for one in jobs if one.job.rank < last.rank]
        found: list[Job] = []
        async for open_job in in_parts(jobs, _AT_ONCE):
            if self._is_running(open_job) == (query.state == "running"):
                found.append(open_job.job)
                if len(found) > query.limit:
                    break
        return await self.page(found, query.limit)

    async def page(self, jobs: Sequence[Job], limit: int) -> JobPage:
        """Return the first jobs as a page, which says whether more follow."""
        shown = list(takewhile(PageSize().takes, jobs[:limit]))
        # each may be a forecast of its own
        predicted = in_parts(shown[:_MOST_PREDICTED], 1)
        others = in_parts(shown[_MOST_PREDICTED:], _AT_ONCE)
        views = [self.view(job) async for job in predicted]
        views += [self.view(job, predicts="known") async for job in others]
        return JobPage(tuple(views), has_more=len(views) < len(jobs))
