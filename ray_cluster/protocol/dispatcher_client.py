"""What the HTTP layer asks of the dispatcher; Ray is behind it, never in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ray_cluster.observability.metrics_snapshot import Snapshot
from ray_cluster.protocol.jobs import Creation, Job, JobQuery, JobView
from ray_cluster.protocol.outcomes import Outcome, Sight, Submission
from ray_cluster.requests import ImageRequest, ModelProfile


class DispatcherClient(Protocol):
    """The gateway's way to the one dispatcher of its cell.

    Every method raises :class:`~ray_cluster.errors.DispatcherUnavailable` when the dispatcher is
    starting, dead or unreachable, those of jobs :class:`~ray_cluster.errors.JobStoreUnavailable`
    when their store is, and nothing else: the caller gets 503 and may try again.
    """

    async def submit(
        self, requests: Sequence[ImageRequest], wait_s: float, client: str
    ) -> Submission:
        """Ask for admission of the whole group, and wait for its first outcomes if accepted.

        Accepted means that all of the group is queued. Not accepted is answered at once.

        Args:
            client: whose it is; how many images one may have in flight is bounded.
        """
        ...

    async def wait(self, request_ids: Sequence[str], timeout_s: float) -> dict[str, Outcome]:
        """Return the outcomes that are there, as soon as there is one, or nothing at the timeout.

        A call also says that the client of these attached requests still waits for them. An
        outcome is handed out once; an id that the dispatcher does not know is ``lost``.
        """
        ...

    async def watch(self, request_id: str, seen: int, timeout_s: float) -> Sight:
        """Return how a request ended, or a preview after number ``seen``; else as :meth:`wait`."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Give these requests up; ids that are unknown or done are passed over."""
        ...

    async def create_job(self, job: Job) -> Creation:
        """Have a job accepted, once for its client's idempotency key, or refused."""
        ...

    async def job(self, client: str, job_id: str, wait_s: float = 0.0) -> JobView | None:
        """Return a client's job, once it has ended or ``wait_s`` are over."""
        ...

    async def job_change(
        self, client: str, job_id: str, seen: str, wait_s: float
    ) -> JobView | None:
        """Return a client's job once its version is not ``seen``, or ``wait_s`` are over."""
        ...

    async def jobs(self, query: JobQuery) -> list[JobView]:
        """Return a page of a client's jobs."""
        ...

    async def cancel_job(self, client: str, job_id: str) -> JobView | None:
        """End a client's job now; one that has ended stays as it is."""
        ...

    async def metrics(self, process_id: str, own: Snapshot) -> Snapshot:
        """Return the metrics of the whole cell, the caller's present ones included."""
        ...

    async def tell_metrics(self, process_id: str, own: Snapshot) -> None:
        """Hand over the caller's present metrics."""
        ...

    async def warnings(self) -> Sequence[str]:
        """Return what is wrong though calls are answered, for an operator."""
        ...

    async def models(self) -> Mapping[str, ModelProfile]:
        """Return the profile of every model that a replica has registered, by name."""
        ...
