"""What the dispatcher's log tells of durable jobs."""

from __future__ import annotations

import logging
from typing import Unpack

from ray_cluster.observability.logs import LogEvent, LogFields, log_event
from ray_cluster.protocol.jobs import Job

logger = logging.getLogger(__name__)


def tell(event: LogEvent, job: Job, **fields: Unpack[LogFields]) -> None:
    """Write that something has happened to a job."""
    first = job.requests[0]
    fields["job_id"] = job.job_id
    fields["request_id"] = first.call_id
    fields["model"] = first.model
    log_event(logger, event, **fields)


def tell_end(job: Job) -> None:
    """Write how a job has ended."""
    elapsed_s = (job.finished_s or job.created_s) - job.created_s
    tell(
        "job_ended",
        job,
        state=job.state,
        num_images=len(job.requests),
        num_attempts=job.attempts,
        elapsed_s=elapsed_s,
        slo_s=job.slo_s,
        deadline_met=job.state == "completed" and elapsed_s <= job.slo_s,
    )
