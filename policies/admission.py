"""Whether a group of requests is admitted, and when it will be done.

A group with deadlines (``when_late: refuse``) is admitted only if it is feasible: all of it is
predicted to be in time, and no request that would be in time is made late. Where all slots are
taken, leased requests may be preempted for it (:mod:`ray_cluster.policies.preemption`). If it may
be made with fewer steps, it gets as many as are feasible (:mod:`ray_cluster.policies.deadlines`).
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice, repeat

from ray_cluster.policies.deadlines import (
    Outlook,
    ends_of_group_s,
    has_deadline,
    least_slo_s,
    outlook_of,
)
from ray_cluster.policies.forecast import ForecastView, forecast_s
from ray_cluster.policies.load import load_s
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.preemption import Exchange
from ray_cluster.policies.queue_view import ClientView, QueueView
from ray_cluster.policies.types import Offer, RequestView


def admit(
    group: Sequence[RequestView], queue: QueueView, client: ClientView | None = None
) -> Offer:
    """Decide over a group of requests for one model: all of them or none.

    A group is refused when it does not fit into the queue, or its client would have too many in
    flight. Lateness is a reason only if one of the group says so; before that, requests that may
    have fewer steps get as few as are needed.

    Args:
        group: arrives now.
        client: None where it has no bounds.
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
            wait_s = _ends_s(num_to_end, client.in_flight, queue, group[0].arrival_s)
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
    if not any(has_deadline(one) for one in group):
        return _admit_however_late(group, queue)
    return _admit_in_time(group, queue)


def _admit_in_time(group: Sequence[RequestView], queue: QueueView) -> Offer:
    """Accept with as many steps as are feasible.

    If none are, the group is made with the fewest however late, unless one asks to be refused.
    """
    most = max(one.num_steps - (one.fewest_steps or one.num_steps) for one in group)

    @cache
    def with_less(num: int) -> tuple[Sequence[RequestView], Outlook]:
        shortened = _with_fewer_steps(group, num)
        return shortened, outlook_of(shortened, queue)

    fewest = with_less(most)[1]
    if fewest.late_s > 0 and any(one.when_late == "refuse" for one in group):
        idle_s = least_slo_s(with_less(most)[0], queue)
        return Offer(
            accepted=False,
            predicted_s=idle_s or 0.0,
            reason="too_late",
            retry_after_s=fewest.late_s if idle_s is None else math.inf,
        )
    # the fewest steps that each gives up; all that it may if even that is too slow
    num_fewer = bisect_left(range(most), True, key=lambda num: with_less(num)[1].late_s <= 0)
    shortened, outlook = with_less(num_fewer)
    num_steps = tuple(one.num_steps for one in shortened) if num_fewer else ()
    return replace(_accepted(shortened, queue, outlook.exchange), num_steps=num_steps)


def _with_fewer_steps(group: Sequence[RequestView], num_fewer: int) -> Sequence[RequestView]:
    """The group with so many steps less, as far as each may have less."""
    return [
        replace(one, num_steps=max(one.fewest_steps or one.num_steps, one.num_steps - num_fewer))
        for one in group
    ]


def _admit_however_late(group: Sequence[RequestView], queue: QueueView) -> Offer:
    """Accept a group however late it will be, in time if that takes no more than an exchange."""
    offer = _accepted(group, queue)
    is_late = any(offer.predicted_s > one.deadline_s - one.arrival_s for one in group)
    if not (is_late and offer.is_simulated and queue.has_preemption):
        return offer
    exchange = outlook_of(group, queue).exchange
    return offer if exchange is None else _accepted(group, queue, exchange)


def _accepted(
    group: Sequence[RequestView], queue: QueueView, exchange: Exchange | None = None
) -> Offer:
    view = exchange.view if exchange else queue.forecast_view(group, group[0].arrival_s)
    return Offer(
        accepted=True,
        predicted_s=_predict_s(group, queue, view),
        is_simulated=view is not None,
        exchanges=() if exchange is None else exchange.pairs,
    )


def predict_s(group: Sequence[RequestView], queue: QueueView, now_s: float) -> float:
    """Return the seconds until the last of the group, all of one model, is done.

    Ahead of it is what is in progress and what waits before it in the queue's order. If the cell
    is small enough to simulate, likely arrivals count as well.

    Raises:
        ValueError: the model never had a replica.
    """
    return _predict_s(group, queue, queue.forecast_view(group, now_s))


def _predict_s(group: Sequence[RequestView], queue: QueueView, view: ForecastView | None) -> float:
    if view is None:
        return float(ends_of_group_s(group, queue).max())
    ends_s = forecast_s(view, group)
    return max(ends_s[one.request_id] for one in group)


def _ends_s(
    num_ends: int, in_flight: Sequence[RequestView], queue: QueueView, now_s: float
) -> float:
    """Return the seconds until that many of a client's requests have probably ended."""
    if num_ends > len(in_flight):
        return math.inf
    by_end = sorted(in_flight, key=lambda r: (queue.is_waiting(r), r.remaining_steps, queue_key(r)))
    return predict_s([by_end[num_ends - 1]], queue, now_s)


def drain_s(num_departures: int, queue: QueueView) -> float:
    """Return the seconds until that many waiting requests, of whatever model, are leased.

    Infinite if no replica can ever take them.
    """
    departures = heapq.merge(*(_departures_s(model, queue) for model in queue.waiting_models))
    return next(islice(departures, num_departures - 1, None), math.inf)


def _departures_s(model: str, queue: QueueView) -> Iterator[float]:
    """Seconds until each waiting request of the model is leased.

    Free slots are taken at once; after that requests leave at the pace of full batches.
    """
    waiting, pool = queue.waiting(model), queue.pool(model)
    if pool is None:
        yield from repeat(math.inf, waiting.num_requests)
        return
    num_free = min(queue.num_free(model), waiting.num_requests)
    yield from repeat(0.0, num_free)
    interval_s = load_s(pool.shared_cost, waiting) / waiting.num_requests
    for number in range(1, waiting.num_requests - num_free + 1):
        yield pool.starts_in_s + number * interval_s
