"""How much of a model's queue a client may fill.

The queue of a model is bounded by the images in it and by the seconds that its replicas need for
them. A client alone may fill all of it; where several clients wait for the model, each may fill an
equal part. So a client that comes late always finds its part free, whatever others have queued
before; and what N clients queue, one after the other, is at most the bound times the sum of 1/n up
to N, which is cut off at four times the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ray_cluster.policies.admission.load import Load, load_s, total_load
from ray_cluster.policies.admission.queue_view import QueueView
from ray_cluster.policies.types import RequestView

# of what all clients together may have in the queue of a model
MOST_BOUNDS = 4


@dataclass(frozen=True, slots=True)
class ShareView:
    """What waits for a group's model, and whose it is.

    Attributes:
        own: load of the client's requests that wait; those held back for their add-ons count for a
            group that would be, too.
        num_clients: whose requests wait, with the one of the group.
        num_waiting: all requests that wait.
        is_held_back: whether the group would be held back first.
        num_until: returns how many requests are queued up to the client's own of that number, in
            the queue's order.
    """

    own: Load
    num_clients: int
    num_waiting: int
    is_held_back: bool = False
    num_until: Callable[[int], int] = int


def num_too_many(group: Sequence[RequestView], share: ShareView, queue: QueueView) -> int:
    """Return how many of a client's waiting requests must go before a group fits; 0 if it does.

    A client that has nothing waiting may always queue a group, however long that takes.

    Args:
        group: at least one, for a model that has had a replica.
    """
    over = share.num_waiting + len(group) - MOST_BOUNDS * queue.max_waiting
    num_own = share.own.num_requests
    if not num_own:
        return max(0, over)
    most = max(1, queue.max_waiting // share.num_clients)
    return min(num_own, max(0, over, num_own + len(group) - most, _too_long(group, share, queue)))


def _too_long(group: Sequence[RequestView], share: ShareView, queue: QueueView) -> int:
    """How many of a client's requests must go until the rest takes no longer than its part."""
    pool = queue.pool(group[0].model)
    assert pool is not None, f"{group[0].model} never had a replica"
    own_s = load_s(pool.shared_cost, share.own)
    whole_s = own_s + load_s(pool.shared_cost, total_load(group))
    over_s = whole_s - queue.max_waiting_s / share.num_clients
    return math.ceil(over_s * share.own.num_requests / own_s) if over_s > 0 < own_s else 0
