"""The orders of the waiting queue and of a replica's rows.

Priorities are strict, so that those below would wait for ever while enough comes above. Therefore a
request that has waited too long *ages*: it comes before all that have not, and those that have are
served in the order of their deadlines. Whoever comes after it has aged has a later deadline than
it, so that it waits for those alone who were there then.
"""

from __future__ import annotations

from ray_cluster.policies.types import RequestView

# of those that have aged; above what a client can ask for
AGED_PRIORITY = 1_000_000

QueueKey = tuple[int, float, float, str]
Urgency = tuple[int, bool, QueueKey]


def queue_key(request: RequestView) -> QueueKey:
    """Return the sort key: higher priority, earlier deadline, earlier arrival, then id.

    It does not change while a request lives, unless that ages: one that comes back from a replica
    finds the place it had.
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
