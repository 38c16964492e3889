"""When requests will be done, as a fluid would flow.

All replicas of a model together are one server, with as many slots as its replicas step requests at
once. Requests leave it at the pace of full batches; who finds no slot free waits for as many
departures as it takes, and then spends the time of a full batch. For equal replicas that is within
two batches of what they will do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.load import Amounts
from ray_cluster.policies.pool import PoolView

Floats = npt.NDArray[np.float64]

_REQUESTS = 0
# pixels and their squares: what a batch's rows add to its step
_ROWS = slice(2, 4)


def ends_s(own: Amounts, ahead: Amounts, pool: PoolView) -> Floats:
    """Return the seconds until each request ends, [...].

    Args:
        own: what is left to do of each request, [..., 5].
        ahead: what is ahead of it, likewise, or [5] for all alike: in progress, and waiting before
            it.
        pool: the replicas that share the work.
    """
    num_ahead = ahead[..., _REQUESTS]
    departures = np.maximum(num_ahead - pool.num_slots + 1, 0)
    waits_s = departures * (ahead @ pool.shared_prices_s) / np.maximum(num_ahead, 1)
    # its batch holds its part of what is ahead of it, or, if more is ahead than there are slots,
    # as many of its like as there may be
    peers = np.minimum(pool.max_batch, np.ceil((num_ahead + 1) / pool.num_replicas)) - 1
    together = own.copy()
    part = ahead[..., _ROWS] / pool.num_replicas
    together[..., _ROWS] += np.minimum(peers[..., None] * own[..., _ROWS], part)
    found: Floats = waits_s + together @ pool.slowest_prices_s
    return found
