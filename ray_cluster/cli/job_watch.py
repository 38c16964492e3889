"""Follows jobs until all of them have ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from rich.console import Console

from ray_cluster.api.replies import JobResponse
from ray_cluster.cli.patience import ask_again
from ray_cluster.cli.remote_service import RemoteService

_POLL_S = 0.4
# a service that is started again is back before
_SILENCE_S = 120.0


def open_job_ids(service: RemoteService) -> list[str]:
    """Return the ids of all jobs that have not ended, the oldest first."""
    # in this order: one that begins to run meanwhile is in both, and not in neither
    jobs = {job.id: job for state in ("queued", "running") for job in service.jobs(state)}
    return [job.id for job in sorted(jobs.values(), key=lambda job: job.created)]


def follow(
    service: RemoteService, job_ids: Sequence[str], notices: Console
) -> Iterator[list[JobResponse]]:
    """Yield the jobs as they are, again and again, and for the last time once all have ended.

    Args:
        notices: is told of a lost connection.

    Raises:
        InvalidRequest: there is no such job.
        NoAnswer: for two minutes.
    """
    jobs = {job_id: service.job(job_id) for job_id in job_ids}
    yield list(jobs.values())
    while any(job.finished is None for job in jobs.values()):
        time.sleep(_POLL_S)
        for job_id, job in jobs.items():
            if job.finished is None:
                until_s = time.monotonic() + _SILENCE_S
                call = partial(service.job, job_id)
                jobs[job_id] = ask_again(call, until_s=until_s, console=notices)
        yield list(jobs.values())
