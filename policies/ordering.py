"""The order of the waiting queue."""

from __future__ import annotations

from ray_cluster.policies.types import RequestView

QueueKey = tuple[int, float, float, str]


def queue_key(request: RequestView) -> QueueKey:
    """Return the sort key: higher priority, earlier deadline, earlier arrival, then id.

    It does not change while a request lives: one that comes back from a dead replica finds the
    place it had.
    """
    return (-request.priority, request.deadline_s, request.arrival_s, request.request_id)
