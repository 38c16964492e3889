"""When requests will be done, as a fluid would flow.

All replicas of a model together are one server, with as many slots as its replicas step requests at
once. Requests leave it at the pace of full batches; who finds no slot free waits for as many
departures as it takes, and then spends the time of a full batch. For equal replicas that is within
two batches of what they will do.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.load import Load
from ray_cluster.policies.pool import PoolView
from ray_cluster.policies.types import StepCost

Floats = npt.NDArray[np.float64]
Amounts = Floats
"""[..., 5]: the fields of :class:`Load`, in their order."""

_REQUESTS = 0
# pixels and their squares: what a batch's rows add to its step
_ROWS = slice(2, 4)


def amounts_of(load: Load) -> Amounts:
    """Return a load as an array, [5]."""
    return np.array(
        (
            load.num_requests,
            load.steps,
            load.step_pixels,
            load.step_squares,
            load.decode_pixels,
        ),
        dtype=float,
    )


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
    waits_s = departures * _seconds(pool.shared_cost, ahead) / np.maximum(num_ahead, 1)
    # its batch holds its part of what is ahead of it, or, if more is ahead than there are slots,
    # as many of its like as there may be
    peers = np.minimum(pool.max_batch, np.ceil((num_ahead + 1) / pool.num_replicas)) - 1
    together = own.copy()
    part = ahead[..., _ROWS] / pool.num_replicas
    together[..., _ROWS] += np.minimum(peers[..., None] * own[..., _ROWS], part)
    found: Floats = waits_s + _seconds(pool.slowest_cost, together)
    return found


def _seconds(cost: StepCost, amounts: Amounts) -> Floats:
    """As :func:`ray_cluster.policies.load.load_s`, for many."""
    prices = np.array(
        (
            0.0,
            cost.fixed_s,
            cost.per_megapixel_s / 1e6,
            cost.per_squared_megapixel_s / 1e12,
            cost.decode_per_megapixel_s / 1e6,
        )
    )
    found: Floats = amounts @ prices
    return found
