"""Whether a group of requests is let into the queue, and when it will be done.

A group that would rather be refused than late is let in only if the whole queue can bear it: all of
it is predicted to be in time, and nobody who would be in time is made late. If it may be made with
fewer steps, it is given as many as can be borne. Where little is there, all of it is followed step
by step (:mod:`ray_cluster.policies.forecast`); more flows as a fluid
(:mod:`ray_cluster.policies.prediction`), whose predictions are stretched by how wrong they have
been of late. So promises are mostly kept.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, repeat

import numpy as np

from ray_cluster.policies.forecast import Scene, forecast_s
from ray_cluster.policies.load import amounts_of, load_of, load_s
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.prediction import Floats, LineEnds, ends_s
from ray_cluster.policies.queue_view import ClientView, QueueView
from ray_cluster.policies.types import Offer, RequestView

# what predictions are at least multiplied by where everybody there was followed: steps are not all
# alike, and progress is told now and then
LEAST_ALLOWANCE = 1.1


def admit(
    group: Sequence[RequestView], queue: QueueView, client: ClientView | None = None
) -> Offer:
    """Decide over a group of requests for one model: all of them or none.

    A group is refused when it does not fit into the queue, or its client would have too many in
    flight. Lateness is a reason only if one of the group says so. Before that, those who put up
    with fewer steps get fewer, just as few as are needed.

    Args:
        group: arrives now.
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
    if not any(_minds(one) for one in group):
        return _accepted(group, queue)
    return _admit_in_time(group, queue)


def _minds(one: RequestView) -> bool:
    """Whether it matters for what becomes of a request that it would be late."""
    return one.when_late == "refuse" or one.fewest_steps is not None


def _admit_in_time(group: Sequence[RequestView], queue: QueueView) -> Offer:
    """Accept with as many steps as can be borne.

    If none are, the group is made with the fewest, as well as it goes, unless one would rather be
    refused.
    """
    most = max(one.num_steps - (one.fewest_steps or one.num_steps) for one in group)
    late_s = _late_s(_with_fewer_steps(group, most), queue)
    if late_s > 0 and any(one.when_late == "refuse" for one in group):
        return Offer(accepted=False, reason="too_late", retry_after_s=late_s)
    # how many steps each gives up, at the least; all that it may if even that is too slow
    num_fewer = bisect_left(
        range(most), True, key=lambda num: _late_s(_with_fewer_steps(group, num), queue) <= 0
    )
    shortened = _with_fewer_steps(group, num_fewer)
    num_steps = tuple(one.num_steps for one in shortened) if num_fewer else ()
    return replace(_accepted(shortened, queue), num_steps=num_steps)


def _with_fewer_steps(group: Sequence[RequestView], num_fewer: int) -> Sequence[RequestView]:
    """The group with so many steps less for everybody who may have them."""
    return [
        replace(one, num_steps=max(one.fewest_steps or one.num_steps, one.num_steps - num_fewer))
        for one in group
    ]


def _late_s(group: Sequence[RequestView], queue: QueueView) -> float:
    """Seconds by which one who minds is late, or another is made late; 0 or less if nobody is."""
    now_s = group[0].arrival_s
    scene = queue.scene(group, now_s)
    if scene is not None:
        known = queue.allowance(group[0].model, is_followed=True)
        return _late_there_s(group, scene, max(LEAST_ALLOWANCE, known))
    slacks_s = np.array([one.deadline_s - now_s for one in group])
    minds = np.array([_minds(one) for one in group])
    safe_s = queue.allowance(group[0].model, is_followed=False) * _ends_of_group_s(group, queue)
    return max(float((safe_s - slacks_s)[minds].max()), _harm_s(group, queue, now_s))


def _late_there_s(group: Sequence[RequestView], scene: Scene, allowance: float) -> float:
    """The same where all that is there can be followed; who comes later can be refused then."""
    sure = replace(scene, later=())
    own = {one.request_id for one in group}
    late_by_id = _lates_s(sure, allowance)
    found_s = max(late_by_id[one.request_id] for one in group if _minds(one))
    harmed = {one for one, late_s in late_by_id.items() if late_s > 0 and one not in own}
    if harmed:
        line = [one for one in scene.line if one.request_id not in own]
        before = _lates_s(replace(sure, line=line), allowance)
        harms_s = (late_by_id[one] for one in harmed if before[one] <= 0)
        found_s = max(found_s, max(harms_s, default=0.0))
    return found_s


def _lates_s(scene: Scene, allowance: float) -> dict[str, float]:
    """Seconds by which each request of a scene is late, negative for those in time."""
    ends_s = forecast_s(scene)
    return {
        one.request_id: allowance * ends_s[one.request_id] - (one.deadline_s - scene.now_s)
        for one in scene.requests
    }


def _harm_s(group: Sequence[RequestView], queue: QueueView, now_s: float) -> float:
    """Seconds by which a group makes somebody late who waits behind it and would be in time."""
    first = min(group, key=queue_key)
    behind, pool = queue.behind(first), queue.pool(first.model)
    if pool is None or not len(behind.deadlines_s):
        return 0.0
    before = amounts_of(queue.ahead_of(first))
    more = sum((amounts_of(load_of(one)) for one in group), np.zeros_like(before))
    line, slacks_s = LineEnds(behind.amounts, pool), behind.deadlines_s - now_s
    allowance = queue.allowance(first.model, is_followed=False)
    in_time = allowance * line.after(before) <= slacks_s
    late_s = allowance * line.after(before + more) - slacks_s
    return float(late_s[in_time].max(initial=0.0))


def _accepted(group: Sequence[RequestView], queue: QueueView) -> Offer:
    scene = queue.scene(group, group[0].arrival_s)
    predicted_s = _predict_s(group, queue, scene)
    return Offer(accepted=True, predicted_s=predicted_s, is_followed=scene is not None)


def predict_s(group: Sequence[RequestView], queue: QueueView, now_s: float) -> float:
    """Return the seconds until the last of the group, all of one model, is done.

    Ahead of it is what is in progress and what waits before it in the queue's order; where that is
    little enough to be followed, what is likely to come counts, too.

    Raises:
        ValueError: the model never had a replica.
    """
    return _predict_s(group, queue, queue.scene(group, now_s))


def _predict_s(group: Sequence[RequestView], queue: QueueView, scene: Scene | None) -> float:
    if scene is None:
        return float(_ends_of_group_s(group, queue).max())
    ends_s = forecast_s(scene, group)
    return max(ends_s[one.request_id] for one in group)


def _ends_of_group_s(group: Sequence[RequestView], queue: QueueView) -> Floats:
    """Seconds until each of the group is done, [N], if all of them come to the last one's place."""
    last = max(group, key=queue_key)
    pool = queue.pool(last.model)
    if pool is None:
        raise ValueError(f"there is no replica of {last.model} to predict from")
    own = np.array([amounts_of(load_of(one)) for one in group]).T
    ahead = amounts_of(queue.ahead_of(last))
    if len(group) > 1:
        ahead = ahead + own.sum(axis=1) - amounts_of(load_of(last))
    return ends_s(own, ahead, pool)


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
