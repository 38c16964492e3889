"""Whether a group of requests is let into the queue, and when it will be done.

The prediction is fluid: all replicas of a model together are one server, with as many slots as its
replicas step requests at once. Requests leave it at the pace of full batches; who finds no slot
free waits for as many departures as it takes, and then spends the time of a full batch. For equal
replicas that is within two batches of what they will do.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice, repeat
from operator import add
from typing import Protocol

from ray_cluster.policies.load import Load, load_of, load_s
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.pool import PoolView
from ray_cluster.policies.types import Offer, RequestView


class QueueView(Protocol):
    """What admission may know of the cell.

    A look at sums that the owner of the queue keeps, and no copy: a decision may not take as long
    as the queue is.
    """

    @property
    def max_waiting(self) -> int:
        """Most requests that may wait, over all models."""

    @property
    def num_waiting(self) -> int:
        """Requests that wait, of all models."""

    @property
    def configured(self) -> Collection[str]:
        """Models that may still come up."""

    @property
    def waiting_models(self) -> Sequence[str]:
        """Models of which requests wait."""

    def pool(self, model: str) -> PoolView | None:
        """The model's live replicas, or the last that there was; None if there never was one."""

    def num_free(self, model: str) -> int:
        """Requests that the model's live replicas have room for."""

    def waiting(self, model: str) -> Load:
        """What waits of a model."""

    def ahead_of(self, request: RequestView) -> Load:
        """What is in progress of the request's model, and what waits before it, without itself."""

    def is_waiting(self, request: RequestView) -> bool:
        """Whether the request waits, and is not in progress."""


@dataclass(frozen=True, slots=True)
class ClientView:
    """What admission may know of the client that a group is for.

    Attributes:
        in_flight: its requests that have not ended, waiting or leased.
        max_in_flight: most that it may have.
    """

    in_flight: Sequence[RequestView]
    max_in_flight: int


def admit(
    group: Sequence[RequestView], queue: QueueView, client: ClientView | None = None
) -> Offer:
    """Decide over a group of requests for one model: all of them or none.

    A group is refused when it does not fit into the queue, or its client would have too many in
    flight; being late is no reason.

    Args:
        client: None where nothing bounds it.
    """
    if not group:
        return Offer(accepted=True)
    model = group[0].model
    if queue.pool(model) is None:
        known = model in queue.configured
        return Offer(accepted=False, reason="model_not_ready" if known else "unknown_model")
    if len(group) > queue.max_waiting:
        return Offer(accepted=False, reason="never_fits", retry_after_s=math.inf)
    if client is not None:
        num_to_end = len(client.in_flight) + len(group) - client.max_in_flight
        if num_to_end > 0:
            wait_s = _ends_s(num_to_end, client.in_flight, queue)
            return Offer(
                accepted=False,
                reason="client_limit",
                retry_after_s=wait_s,
                limit=client.max_in_flight,
            )
    num_too_many = queue.num_waiting + len(group) - queue.max_waiting
    if num_too_many > 0:
        wait_s = drain_s(num_too_many, queue)
        return Offer(accepted=False, reason="queue_full", retry_after_s=wait_s)
    return Offer(accepted=True, predicted_s=predict_s(group, queue))


def predict_s(group: Sequence[RequestView], queue: QueueView) -> float:
    """Return the seconds until the last of the group, all of one model, is done.

    Ahead of it is what is in progress and what waits before it in the queue's order.

    Raises:
        ValueError: the model never had a replica.
    """
    last = max(group, key=queue_key)
    pool = queue.pool(last.model)
    if pool is None:
        raise ValueError(f"there is no replica of {last.model} to predict from")
    others = [load_of(one) for one in group if one is not last]
    ahead = reduce(add, others, queue.ahead_of(last))
    # equal requests take equally long: a group is mostly of one kind
    kinds = {
        (one.remaining_steps, one.size_px, one.rows_per_step, one.num_previews): one
        for one in group
    }
    own_s = max(_in_company_s(load_of(one), ahead, pool) for one in kinds.values())
    return _wait_for_slot_s(ahead, pool) + own_s


def _wait_for_slot_s(ahead: Load, pool: PoolView) -> float:
    """Return the seconds until so many have left that one more finds a slot."""
    num_departures = ahead.num_requests - pool.num_slots + 1
    if num_departures <= 0:
        return 0.0
    return num_departures * load_s(pool.shared_cost, ahead) / ahead.num_requests


def _in_company_s(own: Load, ahead: Load, pool: PoolView) -> float:
    """Return the seconds from a request's first step to its end, on the slowest replica.

    Its batch holds its part of what is ahead of it, or, if more is ahead than there are slots, as
    many of its like as there may be.
    """
    num_peers = min(pool.max_batch, math.ceil((ahead.num_requests + 1) / pool.num_replicas)) - 1
    together = replace(
        own,
        step_pixels=own.step_pixels
        + min(num_peers * own.step_pixels, ahead.step_pixels // pool.num_replicas),
        step_squares=own.step_squares
        + min(num_peers * own.step_squares, ahead.step_squares // pool.num_replicas),
    )
    return load_s(pool.slowest_cost, together)


def _ends_s(num_ends: int, in_flight: Sequence[RequestView], queue: QueueView) -> float:
    """Return the seconds until that many of a client's requests have probably ended."""
    if num_ends > len(in_flight):
        return math.inf
    by_end = sorted(in_flight, key=lambda r: (queue.is_waiting(r), r.remaining_steps, queue_key(r)))
    return predict_s([by_end[num_ends - 1]], queue)


def drain_s(num_departures: int, queue: QueueView) -> float:
    """Return the seconds until that many waiting requests, of whatever model, are leased.

    Infinite if nobody can ever take them.
    """
    departures = heapq.merge(*(_departures_s(model, queue) for model in queue.waiting_models))
    return next(islice(departures, num_departures - 1, None), math.inf)


def _departures_s(model: str, queue: QueueView) -> Iterator[float]:
    """Seconds until each waiting request of the model is leased: when places become free.

    A place that is free is taken at once. After that requests leave at the pace of full batches.
    """
    waiting, pool = queue.waiting(model), queue.pool(model)
    if pool is None:
        yield from repeat(math.inf, waiting.num_requests)
        return
    num_free = min(queue.num_free(model), waiting.num_requests)
    yield from repeat(0.0, num_free)
    interval_s = load_s(pool.shared_cost, waiting) / waiting.num_requests
    for number in range(1, waiting.num_requests - num_free + 1):
        yield number * interval_s
