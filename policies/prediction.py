"""When requests will be done, as a fluid would flow.

All replicas of a model together are one server, with as many slots as its replicas step requests at
once. Requests leave it at the pace of full batches; who finds no slot free waits for as many
departures as it takes, and then spends the time of a full batch. For equal replicas that is within
two batches of what they will do. Who needs adapters or a template may be passed over
(:mod:`ray_cluster.policies.placement`), so as many later requests as may be leased before it flow
ahead of it, each as large as itself.
"""

from __future__ import annotations

import numpy as np

from ray_cluster.policies.load import (
    PASSES,
    PIXELS,
    REQUESTS,
    SQUARES,
    Amounts,
    Floats,
    priced_s,
    row_pixels,
)
from ray_cluster.policies.pool import PoolView


def ends_s(own: Amounts, ahead: Amounts, pool: PoolView) -> Floats:
    """Return the seconds until each request ends, [N].

    Args:
        own: what is left to do of each request, [L, N].
        ahead: what is ahead of all of them, in progress and waiting, [L].
        pool: the replicas that share the work.
    """
    flowing, passes = _flowing(ahead, pool), own[PASSES]
    if passes.any():
        flowing = flowing[:, None] + passes * _flowing(own, pool)
    return _ends_s(own, priced_s(pool.slowest_prices_s, own), flowing, pool)


class LineEnds:
    """When those end who stand in line one behind the other.

    Args:
        own: what is left to do of each request, in their order, [L, N].
        pool: the replicas that share the work.
    """

    def __init__(self, own: Amounts, pool: PoolView) -> None:
        self._own, self._pool = own, pool
        self._own_s = priced_s(pool.slowest_prices_s, own)
        each, passes = _flowing(own, pool), own[PASSES]
        self._before = each.cumsum(axis=1) - each
        if passes.any():
            self._before += passes * each

    def after(self, ahead: Amounts) -> Floats:
        """Return the seconds until each ends, [N], with that ahead of the first of them, [L]."""
        flowing = self._before + _flowing(ahead, self._pool)[:, None]
        return _ends_s(self._own, self._own_s, flowing, self._pool)


def _flowing(amounts: Amounts, pool: PoolView) -> Floats:
    """What matters of requests to those behind them.

    Requests, seconds at the pace of full batches, pixels and their squares, [4, ...]: those of
    plain rows that cost as much.
    """
    seconds = priced_s(pool.shared_prices_s, amounts)
    return np.array((amounts[REQUESTS], seconds, *row_pixels(pool.slowest_cost, amounts)))


def _ends_s(own: Amounts, own_s: Floats, flowing: Floats, pool: PoolView) -> Floats:
    """Return the seconds until each ends: its wait, and its own steps with those of its batch."""
    num_ahead, ahead_s, ahead_pixels, ahead_squares = flowing
    departures = np.maximum(num_ahead - (pool.num_slots - 1), 0)
    waits_s = departures * ahead_s / np.maximum(num_ahead, 1)
    # its batch holds its part of what is ahead of it, or, if more is ahead than there are slots,
    # as many of its like as there may be
    peers = np.minimum(pool.max_batch, np.ceil((num_ahead + 1) / pool.num_replicas)) - 1
    own_pixels, own_squares = row_pixels(pool.slowest_cost, own)
    pixels = np.minimum(peers * own_pixels, ahead_pixels / pool.num_replicas)
    squares = np.minimum(peers * own_squares, ahead_squares / pool.num_replicas)
    prices_s = pool.slowest_prices_s
    peers_s = prices_s[PIXELS] * pixels + prices_s[SQUARES] * squares
    found: Floats = pool.starts_in_s + waits_s + own_s + peers_s
    return found
