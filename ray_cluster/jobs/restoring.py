"""Jobs of an earlier dispatcher: which of their images there are, and which have to be made.

That is looked up beside the start, however long the result store is away. Until then a job is
queued for its client, who may cancel it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable

from ray_cluster.dispatch.records import Restored
from ray_cluster.dispatch.service import DispatchService, Keeper
from ray_cluster.jobs.open_job import OpenJob, log_job
from ray_cluster.protocol.jobs import Job, StoredImage
from ray_cluster.requests import ImageResult, Timing, candidate_name
from ray_cluster.storage.blob_store import BlobStore, BlobStoreError

logger = logging.getLogger(__name__)

_AT_ONCE = 8
_RETRY_S = (0.1, 0.5, 2.0, 5.0)


class JobRestorer:
    """Has the images made that open jobs lack.

    Args:
        results: where replicas put the images.
        keeper_of: returns who hears of the images of a job.
        on_restored: called with each job whose images are made, or are all there.
        wall_clock: Unix time in seconds.

    Attributes:
        is_failing: whether the result store cannot be read just now.
    """

    def __init__(
        self,
        dispatch: DispatchService,
        results: BlobStore,
        keeper_of: Callable[[OpenJob], Keeper],
        on_restored: Callable[[OpenJob], None],
        wall_clock: Callable[[], float],
    ) -> None:
        self._dispatch = dispatch
        self._results = results
        self._keeper_of = keeper_of
        self._on_restored = on_restored
        self._wall_clock = wall_clock
        self.is_failing = False

    async def restore(self, open_jobs: Iterable[OpenJob]) -> None:
        """Look up jobs, the first ones first and some at once, and have made what they lack."""
        left = deque(open_jobs)
        await asyncio.gather(*(self._restore_next(left) for _ in range(_AT_ONCE)))

    async def _restore_next(self, left: deque[OpenJob]) -> None:
        failures = 0
        while left:
            open_job = left.popleft()
            try:
                await self._restore(open_job)
                failures, self.is_failing = 0, False
            except BlobStoreError as error:
                # others may be found meanwhile
                left.append(open_job)
                if not self.is_failing:
                    logger.error("job %s is not restored yet: %s", open_job.job.job_id, error)
                self.is_failing = True
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                failures += 1
            except Exception:
                # a mistake of ours: it concerns this job, and no other
                logger.exception("job %s is not restored", open_job.job.job_id)

    async def _restore(self, open_job: OpenJob) -> None:
        job = open_job.job
        if not open_job.pending:
            # cancelled before it is looked up
            return
        done = await asyncio.to_thread(self._done, job)
        light = await asyncio.to_thread(self._light, job)
        if open_job.pending:
            open_job.restore(done)
            # what is done is not to be made any more
            await self._dispatch.abort(done)
            self._make(open_job, light)
            self._on_restored(open_job)

    def _make(self, open_job: OpenJob, light: dict[str, ImageResult]) -> None:
        job = open_job.job
        age_s = max(0.0, self._wall_clock() - job.created_s)
        deferred = {one.request_id: one for one in job.deferred}
        for request in open_job.pending:
            name = request.request_id
            restored = Restored(request, age_s, job.slo_s, deferred.get(name), light.get(name))
            self._dispatch.restore(restored, self._keeper_of(open_job))
        log_job("job_restored", job, num_images=len(open_job.pending))

    def _done(self, job: Job) -> dict[str, StoredImage]:
        """Return which images of a job there are."""
        sizes = {one: self._results.num_bytes(one.file_id) for one in job.requests}
        return {
            one.request_id: StoredImage(one.file_id, one.output.image_format, size, timing=None)
            for one, size in sizes.items()
            if size is not None
        }

    def _light(self, job: Job) -> dict[str, ImageResult]:
        """Return which light images of a job wait for heavy ones in the store."""
        found = {}
        requests = {one.request_id: one for one in job.requests}
        for name in (one.request_id for one in job.deferred if one.is_stored):
            size = self._results.num_bytes(candidate_name(name))
            if size is not None:
                image_format = requests[name].output.image_format
                found[name] = ImageResult(name, b"", image_format, Timing(), size)
        return found
