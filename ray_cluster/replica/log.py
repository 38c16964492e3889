"""What a replica's log says of the images it works on."""

from __future__ import annotations

import logging
from typing import Unpack

from ray_cluster.observability.logs import LogEvent, LogFields, durations_of, log_event
from ray_cluster.protocol.leases import Lease
from ray_cluster.requests import Failure, ImageRequest, Timing

logger = logging.getLogger(__name__)


class ReplicaLog:
    """Writes one line per event of a lease's life on one replica."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id

    def started(self, lease: Lease, steps_done: int) -> None:
        """A lease was taken, perhaps with a state to resume from."""
        self._write(
            "work_started",
            lease.request,
            queue_s=lease.queued_s,
            num_steps=lease.request.num_steps,
            steps_done=steps_done,
        )

    def finished(self, request: ImageRequest, timing: Timing) -> None:
        """An image is in its place."""
        self._write("work_finished", request, **durations_of(timing))

    def failed(self, request: ImageRequest, failure: Failure) -> None:
        """An image can't be made."""
        kind, stage, error = failure.kind, failure.stage, failure.message
        level = logging.WARNING
        self._write("work_failed", request, level, kind=kind, stage=stage, error=error)

    def dropped(self, request: ImageRequest) -> None:
        """The dispatcher has taken a lease away."""
        self._write("work_dropped", request)

    def returned(self, request: ImageRequest, steps_done: int) -> None:
        """A lease was returned, with so many steps in the state store."""
        self._write("work_returned", request, steps_done=steps_done)

    def _write(
        self,
        event: LogEvent,
        request: ImageRequest,
        level: int = logging.INFO,
        **fields: Unpack[LogFields],
    ) -> None:
        fields["replica"] = self._replica_id
        log_event(logger, event, request, level=level, **fields)
