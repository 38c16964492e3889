"""The orders of the waiting queue and of a replica's rows."""

from __future__ import annotations

from ray_cluster.policies.types import RequestView

QueueKey = tuple[int, float, float, str]
Urgency = tuple[int, bool, QueueKey]


def queue_key(request: RequestView) -> QueueKey:
    """Return the sort key: higher priority, earlier deadline, earlier arrival, then id.

    It does not change while a request lives: one that comes back from a dead replica finds the
    place it had.
    """
    return (-request.priority, request.deadline_s, request.arrival_s, request.request_id)


def urgency(request: RequestView, now_s: float) -> Urgency:
    """Return the sort key: priority, then what can still be in time, then the queue's order.

    A row past its deadline must not make others late as well.
    """
    return (-request.priority, request.deadline_s < now_s, queue_key(request))
