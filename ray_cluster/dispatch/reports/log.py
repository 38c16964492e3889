"""What the dispatcher writes into its log of each request."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Unpack

from ray_cluster.dispatch.records import RequestRecord
from ray_cluster.observability.logs import LogEvent, LogFields, durations_of, log_event
from ray_cluster.protocol.outcomes import Completed, Outcome
from ray_cluster.requests import ImageRequest

logger = logging.getLogger(__name__)


def log_image(
    event: LogEvent,
    record: RequestRecord,
    *,
    level: int = logging.INFO,
    **fields: Unpack[LogFields],
) -> None:
    """Log what happens to a request, with the replica that holds it."""
    if record.holder is not None:
        fields["replica"] = record.holder.replica_id
    fields["num_attempts"] = record.num_leases
    log_event(logger, event, record.request, level=level, **fields)


def log_refused(requests: Sequence[ImageRequest], reason: str) -> None:
    """Log that an API call's images were refused."""
    if requests:
        first = requests[0]
        log_event(logger, "images_refused", first, num_images=len(requests), reason=reason)


def log_end(record: RequestRecord, outcome: Outcome) -> None:
    """Log how a request has ended."""
    if isinstance(outcome, Completed):
        fields = durations_of(outcome.result.timing)
        fields["elapsed_s"] = outcome.elapsed_s
        fields["slo_s"] = outcome.slo_s
        fields["deadline_met"] = outcome.deadline_met
        log_image("image_completed", record, **fields)
        return
    is_cancelled = outcome.kind == "aborted"
    log_image(
        "image_cancelled" if is_cancelled else "image_failed",
        record,
        level=logging.INFO if is_cancelled else logging.WARNING,
        kind=outcome.kind,
        stage=outcome.stage,
        error=outcome.message,
        queue_s=record.queued_s,
    )
