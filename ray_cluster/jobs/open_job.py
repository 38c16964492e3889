"""A job that has not ended, as the dispatcher has it in memory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

from ray_cluster.observability.logs import LogEvent, LogFields, log_event
from ray_cluster.protocol.jobs import Job, StoredImage
from ray_cluster.protocol.outcomes import Completed, Deferred, Outcome
from ray_cluster.requests import Failure, ImageRequest

logger = logging.getLogger(__name__)


class OpenJob:
    """Gathers the outcomes of a job's images until there is one of each.

    Attributes:
        job: as it was accepted, with the attempts of its ended images; as it ended, once that is
            stored.
        is_cancelled: whether its client has cancelled it.
        is_void: whether it could not be stored, and so was never accepted.
        is_looked_up: whether it is known which of its images there are.
        inserted: set once its row is in the store, or it is void.
        stored: set once its end is in the store.
    """

    def __init__(self, job: Job, *, is_looked_up: bool = True) -> None:
        self.job = job
        self.is_looked_up = is_looked_up
        self.is_cancelled = False
        self.is_void = False
        self.inserted = asyncio.Event()
        self.stored = asyncio.Event()
        self._images: dict[str, StoredImage] = {}
        self._pending = {request.request_id: request for request in job.requests}
        self._error: Failure | None = None

    def restore(self, done: Mapping[str, StoredImage]) -> None:
        """Note the images that were finished in an earlier life of the dispatcher."""
        self.is_looked_up = True
        self._images = dict(done)
        for request_id in done:
            del self._pending[request_id]

    def cancel(self) -> list[str]:
        """Cancel it; return the ids of those that need not be made any more, once."""
        self.is_cancelled = True
        ids = list(self._pending)
        if not self.is_looked_up:
            # nobody makes them yet
            self._pending.clear()
        return ids

    @property
    def pending(self) -> list[ImageRequest]:
        """The images that have not ended."""
        return list(self._pending.values())

    @property
    def num_made(self) -> int:
        """How many of its images were made."""
        return len(self._images)

    def take(self, outcome: Outcome) -> list[str]:
        """Add an image's outcome; return the ids of those that need not be made any more, once."""
        request = self._pending.pop(outcome.request_id)
        # the attempts that clients see must not fall when an image is no longer in progress
        self.job = replace(self.job, attempts=self.job.attempts + outcome.attempts)
        if isinstance(outcome, Completed):
            result = outcome.result
            self._images[request.request_id] = StoredImage(
                request.file_id,
                result.image_format,
                result.num_bytes,
                result.timing,
                num_steps=outcome.num_steps,
                cascade=outcome.cascade,
                steps_by_degree=result.steps_by_degree,
            )
            return []
        if self._error is not None:
            return []
        self._error = outcome
        return list(self._pending)

    def note(self, deferred: Deferred) -> None:
        """Note that an image is made anew."""
        self.job = replace(self.job, deferred=(*self.job.deferred, deferred))

    def ended(self, now_s: float) -> Job:
        """Return the job as it ended.

        A cancelled job whose images were all done before the cancel reached them is completed.
        """
        images = tuple(self._images.get(one.request_id) for one in self.job.requests)
        # another host's clock may have been ahead
        job = replace(self.job, finished_s=max(now_s, self.job.created_s))
        if all(image is not None for image in images):
            return replace(job, state="completed", images=images)
        if self.is_cancelled:
            return replace(job, state="cancelled")
        return replace(job, state="failed", error=self._error)


def log_job(event: LogEvent, job: Job, **fields: Unpack[LogFields]) -> None:
    """Write to the log that something has happened to a job."""
    first = job.requests[0]
    fields["job_id"] = job.job_id
    fields["request_id"] = first.call_id
    fields["model"] = first.model
    log_event(logger, event, **fields)


def log_job_end(job: Job) -> None:
    """Write to the log how a job has ended."""
    elapsed_s = (job.finished_s or job.created_s) - job.created_s
    log_job(
        "job_ended",
        job,
        state=job.state,
        num_images=len(job.requests),
        num_attempts=job.attempts,
        elapsed_s=elapsed_s,
        slo_s=job.slo_s,
        deadline_met=job.state == "completed" and elapsed_s <= job.slo_s,
    )
