"""When requests will be done, as a fluid: for cells that are too large to simulate step by step.

All replicas of a model are one server, with as many slots as its replicas step requests at once.
Requests leave it at the pace of full batches. One that finds no slot waits for as many departures
as it takes, then spends the time of a full batch. For equal replicas that is within two batches of
the truth. Requests that need adapters or a template may be passed over
(:mod:`ray_cluster.policies.leasing.placement`): as many later requests as may be leased before one
flow ahead of it, each as large as itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ray_cluster.policies.admission.load import (
    PASSES,
    PIXELS,
    REQUESTS,
    SQUARES,
    Amounts,
    Floats,
    priced_s,
    prices_s,
    row_pixels,
)
from ray_cluster.policies.types import ReplicaView, StepCost


@dataclass(frozen=True, slots=True)
class PoolView:
    """The replicas of one model together.

    Attributes:
        num_slots: requests that they step at once.
        max_batch: the largest of any replica.
        shared_cost: one request's part of the cost when all replicas run full batches. Exact where
            the replicas' terms are in proportion, else a little optimistic (a parallel sum is
            superadditive).
        slowest_cost: each term of the replica that is slowest in it.
        starts_in_s: seconds until a replica is live, where none is now.
        shared_prices_s: of ``shared_cost``, see
        :func:`ray_cluster.policies.admission.load.prices_s`. slowest_prices_s: of ``slowest_cost``.
    """

    num_replicas: int
    num_slots: int
    max_batch: int
    shared_cost: StepCost
    slowest_cost: StepCost
    starts_in_s: float = 0.0
    shared_prices_s: Amounts = field(init=False, repr=False, compare=False)
    slowest_prices_s: Amounts = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # a pool lives long, and every prediction asks for these
        object.__setattr__(self, "shared_prices_s", prices_s(self.shared_cost))
        object.__setattr__(self, "slowest_prices_s", prices_s(self.slowest_cost))


def pool_of(replicas: Sequence[ReplicaView]) -> PoolView:
    """Return the view of replicas of one model, at least one."""
    costs = [one.step_cost for one in replicas]
    slowest = slowest_cost(costs)
    return PoolView(
        num_replicas=len(replicas),
        num_slots=sum(one.max_batch for one in replicas),
        max_batch=max(one.max_batch for one in replicas),
        shared_cost=replace(
            slowest,
            fixed_s=_parallel([one.step_cost.fixed_s / one.max_batch for one in replicas]),
            per_megapixel_s=_parallel([cost.per_megapixel_s for cost in costs]),
            decode_per_megapixel_s=_parallel([cost.decode_per_megapixel_s for cost in costs]),
            encode_per_megapixel_s=_parallel([cost.encode_per_megapixel_s for cost in costs]),
            per_squared_megapixel_s=_parallel([cost.per_squared_megapixel_s for cost in costs]),
        ),
        slowest_cost=slowest,
    )


def slowest_cost(costs: Sequence[StepCost]) -> StepCost:
    """Return each term of the replica that is slowest in it, for batches of one size."""
    return StepCost(
        fixed_s=max(cost.fixed_s for cost in costs),
        per_megapixel_s=max(cost.per_megapixel_s for cost in costs),
        decode_per_megapixel_s=max(cost.decode_per_megapixel_s for cost in costs),
        encode_per_megapixel_s=max(cost.encode_per_megapixel_s for cost in costs),
        per_squared_megapixel_s=max(cost.per_squared_megapixel_s for cost in costs),
        source="modelled",
        control_share=max(cost.control_share for cost in costs),
        lora_share=max(cost.lora_share for cost in costs),
        spared_share=min(cost.spared_share for cost in costs),
    )


def _parallel(terms_s: Sequence[float]) -> float:
    """Seconds per unit of work of servers that share the work by their speeds."""
    if min(terms_s) <= 0:
        return 0.0
    return 1 / sum(1 / term_s for term_s in terms_s)


def ends_s(own: Amounts, ahead: Amounts, pool: PoolView) -> Floats:
    """Return the seconds until each request ends, [N].

    Args:
        own: what is left to do of each request, [L, N].
        ahead: what is ahead of all of them, in progress and waiting, [L].
    """
    flowing, passes = _flowing(ahead, pool), own[PASSES]
    if passes.any():
        flowing = flowing[:, None] + passes * _flowing(own, pool)
    return _ends_s(own, priced_s(pool.slowest_prices_s, own), flowing, pool)


class QueueEnds:
    """When requests end that wait one behind the other.

    Args:
        own: what is left to do of each request, in the queue's order, [L, N].
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
    """What matters of requests to those behind them, [4, ...].

    Requests, seconds at the pace of full batches, pixels and squares of plain rows of equal cost.
    """
    seconds = priced_s(pool.shared_prices_s, amounts)
    return np.array((amounts[REQUESTS], seconds, *row_pixels(pool.slowest_cost, amounts)))


def _ends_s(own: Amounts, own_s: Floats, flowing: Floats, pool: PoolView) -> Floats:
    """Seconds until each ends: its wait, and its own steps with those of its batch."""
    num_ahead, ahead_s, ahead_pixels, ahead_squares = flowing
    departures = np.maximum(num_ahead - (pool.num_slots - 1), 0)
    waits_s = departures * ahead_s / np.maximum(num_ahead, 1)
    # its batch holds its part of what is ahead of it, or, if more is ahead than there are slots,
    # as many of its like as there may be
    peers = np.minimum(pool.max_batch, np.ceil((num_ahead + 1) / pool.num_replicas)) - 1
    own_pixels, own_squares = row_pixels(pool.slowest_cost, own)
    pixels = np.minimum(peers * own_pixels, ahead_pixels / pool.num_replicas)
    squares = np.minimum(peers * own_squares, ahead_squares / pool.num_replicas)
    each_s = pool.slowest_prices_s
    peers_s = each_s[PIXELS] * pixels + each_s[SQUARES] * squares
    found: Floats = pool.starts_in_s + waits_s + own_s + peers_s
    return found
