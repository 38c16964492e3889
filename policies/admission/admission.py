"""Whether a group of requests is admitted, and when it will be done.

A group with deadlines (``when_late: refuse``) is admitted only if it is feasible: all of it is
predicted to be in time, and no request that would be in time is made late. Where all slots are
taken, leased requests may be preempted for it (:mod:`ray_cluster.policies.admission.preemption`).
If it may be made with fewer steps, it gets as many as are feasible
(:mod:`ray_cluster.policies.admission.deadlines`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from ray_cluster.policies.admission.deadlines import (
    Forecasts,
    Outlook,
    ends_of_group_s,
    has_deadline,
    least_slo_s,
    outlook_of,
)
from ray_cluster.policies.admission.forecast import ForecastView, forecast_s
from ray_cluster.policies.admission.load import load_s
from ray_cluster.policies.admission.queue_share import ShareView, num_too_many
from ray_cluster.policies.admission.queue_view import ClientView, QueueView
from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.types import Offer, RequestView


def admit(
    group: Sequence[RequestView],
    queue: QueueView,
    client: ClientView | None = None,
    share: ShareView | None = None,
) -> Offer:
    """Decide over a group of requests for one model: all of them or none.

    A group is refused when it does not fit into its client's share of the model's queue, or its
    client would have too many in flight. Lateness is a reason only if one of the group says so;
    before that, requests that may have fewer steps get as few as are needed.

    Args:
        group: arrives now.
        client: None where it has no bounds.
        share: None where all that waits for the model is its client's.
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
    if share is None:
        waiting = queue.waiting(model)
        share = ShareView(waiting, 1, waiting.num_requests)
    if (refused := refuse_beyond(group, share, queue)) is not None:
        return refused
    if not any(has_deadline(one) for one in group):
        return _admit_however_late(group, queue)
    return _admit_in_time(group, queue)


def refuse_beyond(group: Sequence[RequestView], share: ShareView, queue: QueueView) -> Offer | None:
    """Refuse a group that does not fit into its client's share of a model's queue."""
    num = num_too_many(group, share, queue)
    if not num:
        return None
    num_own = share.own.num_requests
    limit = max(0, num_own + len(group) - num)
    if share.is_held_back:
        # it leaves when its add-ons come, and nobody knows when
        return Offer(accepted=False, reason="held_back_full", limit=limit)
    wait_s = drain_s(share.num_until(num) if num_own else num, group[0].model, queue)
    return Offer(accepted=False, reason="queue_full", retry_after_s=wait_s, limit=limit)


def _admit_in_time(group: Sequence[RequestView], queue: QueueView) -> Offer:
    """Accept with as many steps as are feasible.

    If none are, the group is made with the fewest however late, unless one asks to be refused.
    """
    most = max(one.num_steps - (one.fewest_steps or one.num_steps) for one in group)
    forecasts = Forecasts()

    @cache
    def with_less(num: int) -> tuple[Sequence[RequestView], Outlook]:
        shortened = _with_fewer_steps(group, num)
        return shortened, outlook_of(shortened, queue, forecasts)

    fewest = with_less(most)[1]
    if fewest.late_s > 0 and any(one.when_late == "refuse" for one in group):
        idle_s = least_slo_s(with_less(most)[0], queue)
        return Offer(
            accepted=False,
            predicted_s=idle_s or 0.0,
            reason="too_late",
            retry_after_s=fewest.late_s if idle_s is None else math.inf,
        )

    def is_in_time(num: int) -> bool:
        # what cannot be found out in time is left: the group gives up some steps more
        return forecasts.num_left >= 1 and with_less(num)[1].late_s <= 0

    # the fewest steps that each gives up; all that it may if even that is too slow
    num_fewer = bisect_left(range(most), True, key=is_in_time)
    shortened, outlook = with_less(num_fewer)
    num_steps = tuple(one.num_steps for one in shortened) if num_fewer else ()
    return replace(_accepted(shortened, queue, outlook, forecasts), num_steps=num_steps)


def _with_fewer_steps(group: Sequence[RequestView], num_fewer: int) -> Sequence[RequestView]:
    """The group with so many steps less, as far as each may have less."""
    return [
        replace(one, num_steps=max(one.fewest_steps or one.num_steps, one.num_steps - num_fewer))
        for one in group
    ]


def _admit_however_late(group: Sequence[RequestView], queue: QueueView) -> Offer:
    """Accept a group however late it will be, in time if that takes no more than an exchange."""
    view, forecasts = queue.forecast_view(group, group[0].arrival_s), Forecasts()
    predicted_s = _predict_s(group, queue, view, forecasts)
    offer = Offer(accepted=True, predicted_s=predicted_s, is_simulated=view is not None)
    is_late = any(predicted_s > one.deadline_s - one.arrival_s for one in group)
    # with and without the group, and with an exchange
    can_tell = view is not None and forecasts.num_left >= 3
    if not (is_late and can_tell and queue.has_preemption):
        return offer
    outlook = outlook_of(group, queue, forecasts)
    return offer if outlook.exchange is None else _accepted(group, queue, outlook, forecasts)


def _accepted(
    group: Sequence[RequestView], queue: QueueView, outlook: Outlook, forecasts: Forecasts
) -> Offer:
    """Accept as was looked into; likely arrivals count for the prediction, if it is not too late
    for that."""
    exchange, predicted_s = outlook.exchange, outlook.ends_s
    if forecasts.num_left >= 1:
        view = exchange.view if exchange else queue.forecast_view(group, group[0].arrival_s)
        predicted_s = _predict_s(group, queue, view)
    return Offer(
        accepted=True,
        predicted_s=predicted_s,
        is_simulated=outlook.is_simulated,
        exchanges=() if exchange is None else exchange.pairs,
    )


def predict_s(
    group: Sequence[RequestView], queue: QueueView, now_s: float, *, is_simulated: bool = True
) -> float:
    """Return the seconds until the last of the group, all of one model, is done.

    Ahead of it is what is in progress and what waits before it in the queue's order. If the cell
    is small enough to simulate, likely arrivals count as well.

    Args:
        is_simulated: false for a prediction that costs little in every cell.

    Raises:
        ValueError: the model never had a replica.
    """
    view = queue.forecast_view(group, now_s) if is_simulated else None
    return _predict_s(group, queue, view)


def _predict_s(
    group: Sequence[RequestView],
    queue: QueueView,
    view: ForecastView | None,
    forecasts: Forecasts | None = None,
) -> float:
    if view is None:
        return float(ends_of_group_s(group, queue).max())
    ends_s = forecast_s(view, group) if forecasts is None else forecasts.of(view, group)
    return max(ends_s[one.request_id] for one in group)


def _ends_s(
    num_ends: int, in_flight: Sequence[RequestView], queue: QueueView, now_s: float
) -> float:
    """Return the seconds until that many of a client's requests have probably ended."""
    if num_ends > len(in_flight):
        return math.inf
    by_end = sorted(in_flight, key=lambda r: (queue.is_waiting(r), r.remaining_steps, queue_key(r)))
    return predict_s([by_end[num_ends - 1]], queue, now_s)


def drain_s(num_departures: int, model: str, queue: QueueView) -> float:
    """Return the seconds until that many waiting requests of a model are leased.

    Free slots are taken at once; after that requests leave at the pace of full batches. Infinite if
    no replica can ever take them.
    """
    waiting, pool = queue.waiting(model), queue.pool(model)
    if pool is None or num_departures > waiting.num_requests:
        return math.inf
    number = num_departures - min(queue.num_free(model), waiting.num_requests)
    if number <= 0:
        return 0.0
    interval_s = load_s(pool.shared_cost, waiting) / waiting.num_requests
    return pool.starts_in_s + number * interval_s
