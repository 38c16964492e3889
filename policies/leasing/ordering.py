"""The orders of the waiting queue and of a replica's rows.

Priorities are strict, so low ones could wait for ever. Therefore a request that has waited too long
*ages*: it comes before all that have not, and aged requests are served by deadline. Later ones have
later deadlines, so an aged request waits only for those that were there before it aged.
"""

from __future__ import annotations

from ray_cluster.policies.types import RequestView

# of those that have aged; above what a client can ask for
AGED_PRIORITY = 1_000_000

QueueKey = tuple[int, float, float, str]
Urgency = tuple[int, bool, QueueKey]


def queue_key(request: RequestView) -> QueueKey:
    """Return the sort key: higher priority, earlier deadline, earlier arrival, then id.

    It does not change while a request lives, unless that ages.
    """
    return (-request.priority, request.deadline_s, request.arrival_s, request.request_id)


def urgency(request: RequestView, now_s: float) -> Urgency:
    """Return the sort key: priority, then what can still be in time, then the queue's order.

    A row past its deadline must not make others late as well.
    """
    return (-request.priority, request.deadline_s < now_s, queue_key(request))


def ages_at_s(request: RequestView, patience_s: float) -> float:
    """Return the instant at which a request has waited too long: never before its deadline.

    Args:
        patience_s: seconds from its arrival.
    """
    return max(request.arrival_s + patience_s, request.deadline_s)
