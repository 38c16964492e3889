"""A job that has not ended, as the dispatcher has it in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from ray_cluster.protocol.jobs import Job, StoredImage
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import Failure, ImageRequest


class OpenJob:
    """Gathers the outcomes of a job's images until there is one of each.

    Args:
        done: images that were finished in an earlier life of the dispatcher, by request id.

    Attributes:
        job: as it was accepted, with the attempts of its ended images; as it ended, once that is
            kept.
        is_cancelled: whether its client has given it up.
        is_void: whether it could not be kept, and so never was.
        kept: set once its end is in the store.
    """

    def __init__(self, job: Job, done: Mapping[str, StoredImage]) -> None:
        self.job = job
        self.is_cancelled = False
        self.is_void = False
        self.kept = asyncio.Event()
        self._images: dict[str, StoredImage] = dict(done)
        self._pending = {
            request.request_id: request
            for request in job.requests
            if request.request_id not in done
        }
        self._error: Failure | None = None

    @property
    def pending(self) -> list[ImageRequest]:
        """The images that have not ended."""
        return list(self._pending.values())

    @property
    def num_made(self) -> int:
        """How many of its images were made."""
        return len(self._images)

    def take(self, outcome: Outcome) -> list[str]:
        """Take in how an image ended; return the ids of those that need not be made any more."""
        request = self._pending.pop(outcome.request_id)
        # what is seen of it must not fall back when an image is no longer in progress
        self.job = replace(self.job, attempts=self.job.attempts + outcome.attempts)
        if isinstance(outcome, Completed):
            result = outcome.result
            self._images[request.request_id] = StoredImage(
                request.file_id, result.image_format, result.num_bytes, result.timing
            )
            return []
        self._error = self._error or outcome
        return list(self._pending)

    def ended(self, now_s: float) -> Job:
        """Return the job as it ended.

        A cancelled job whose images were all done before the cancel reached them is completed.
        """
        images = tuple(self._images.get(one.request_id) for one in self.job.requests)
        job = replace(self.job, finished_s=now_s)
        if all(image is not None for image in images):
            return replace(job, state="completed", images=images)
        if self.is_cancelled:
            return replace(job, state="cancelled")
        return replace(job, state="failed", error=self._error)
