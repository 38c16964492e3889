"""The store of durable jobs: a small interface, and the one implementation behind it.

Written by the dispatcher alone. A job takes three writes: accepted, ended,
purged. What goes on in between is in memory, and is found again by what it left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ray_cluster.errors import RayClusterError
from ray_cluster.protocol.jobs import Job, JobQuery
from ray_cluster.protocol.leases import Registration


class JobStoreError(RayClusterError):
    """The job store can't be opened, read or written; the message names the store."""


class JobStore(Protocol):
    """Keeps jobs across the death of every process. Calls block: keep them off event loops.

    Every method raises :class:`JobStoreError`, and nothing else, when the store fails.
    """

    def insert(self, job: Job) -> Job:
        """Keep a new job and return it; if its client has used its key before, return that job.

        When this returns, the job survives a power failure.
        """

    def update(self, job: Job) -> None:
        """Keep what changes in a job's life: state, end, attempts, images, error.

        A job that has ended is never changed again, and one that is not there is not made.
        """

    def get(self, job_id: str) -> Job | None:
        """Return a job."""

    def find(self, client: str, idempotency_key: str) -> Job | None:
        """Return the client's job with that key."""

    def page(self, query: JobQuery) -> list[Job]:
        """Return a client's jobs, the newest first; behind an unknown one there is nothing."""

    def unfinished(self) -> list[Job]:
        """Return every job that has not ended, the oldest first."""

    def purge(self, finished_before_s: float, *, limit: int) -> list[Job]:
        """Forget jobs that ended before that instant, the oldest first; return them."""

    def forget(self, job_ids: Sequence[str]) -> None:
        """Forget these jobs, ended or not."""

    def keep_worker(self, registration: Registration, registered_s: float) -> None:
        """Keep how a pool's workers presented themselves last, in place of what there was."""

    def workers(self) -> list[Registration]:
        """Return how each pool's workers presented themselves last, as far as it can be read."""

    def together(self) -> AbstractContextManager[None]:
        """Keep what this thread calls within it at its end, all of it; after an error, nothing."""

    def close(self) -> None:
        """Let go of files and connections."""
