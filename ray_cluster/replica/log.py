"""What a replica's log tells of the images it works on."""

from __future__ import annotations

import logging
from typing import Unpack

from ray_cluster.engine.state import RequestState
from ray_cluster.observability.logs import LogEvent, LogFields, durations_of, log_event
from ray_cluster.protocol.leases import Lease
from ray_cluster.requests import Failure, ImageRequest, Timing

logger = logging.getLogger(__name__)


class ReplicaLog:
    """Writes one line per event of a lease's life on one replica."""

    def __init__(self, replica_id: str) -> None:
        self._replica_id = replica_id

    def started(self, lease: Lease, state: RequestState | None) -> None:
        """Tell that a lease was taken, and from which step it goes on."""
        self._tell(
            "work_started",
            lease.request,
            queue_s=lease.queued_s,
            num_steps=lease.request.num_steps,
            steps_done=state.step_index if state else 0,
        )

    def finished(self, request: ImageRequest, timing: Timing) -> None:
        """Tell that an image is in its place."""
        self._tell("work_finished", request, **durations_of(timing))

    def failed(self, request: ImageRequest, failure: Failure) -> None:
        """Tell that an image can't be made."""
        log_event(
            logger,
            "work_failed",
            request,
            level=logging.WARNING,
            replica=self._replica_id,
            kind=failure.kind,
            stage=failure.stage,
            error=failure.message,
        )

    def dropped(self, request: ImageRequest) -> None:
        """Tell that the dispatcher has taken a lease away."""
        self._tell("work_dropped", request)

    def returned(self, request: ImageRequest, steps_done: int) -> None:
        """Tell that a lease is handed back, with the steps that are in the state store."""
        self._tell("work_returned", request, steps_done=steps_done)

    def _tell(self, event: LogEvent, request: ImageRequest, **fields: Unpack[LogFields]) -> None:
        fields["replica"] = self._replica_id
        log_event(logger, event, request, **fields)
