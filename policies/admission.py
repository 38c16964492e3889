"""Whether a group of requests is let into the queue, and when it will be done.

The prediction is fluid: all replicas of a model together are one server that works off
outstanding replica seconds, as if every batch were full. On top comes the time that the request
itself spends in its batch. It is exact for a busy pool of equal replicas and long queues, and
errs on the late side when the pool is nearly idle.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ray_cluster.policies.cost_model import (
    StepWork,
    alone_s,
    batch_s,
    decodes_s,
    row_megapixels,
    step_s,
)
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.types import Offer, ReplicaView, RequestView, StepCost


@dataclass(frozen=True, slots=True)
class QueueView:
    """What admission may know of the cell.

    Attributes:
        waiting: waiting requests of all models, in any order.
        in_progress: leased requests of all models, with the steps they have done.
        replicas: live replicas of all models; for a model without one, the last that there was.
        max_waiting: most requests that may wait, over all models.
        configured: models that may still come up.
    """

    waiting: Sequence[RequestView]
    in_progress: Sequence[RequestView]
    replicas: Sequence[ReplicaView]
    max_waiting: int
    configured: Collection[str] = ()


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
    if not any(replica.model == model for replica in queue.replicas):
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
    num_too_many = len(queue.waiting) + len(group) - queue.max_waiting
    if num_too_many > 0:
        wait_s = drain_s(num_too_many, queue)
        return Offer(accepted=False, reason="queue_full", retry_after_s=wait_s)
    return Offer(accepted=True, predicted_s=predict_s(group, queue))


def predict_s(group: Sequence[RequestView], queue: QueueView) -> float:
    """Return the seconds until the last of the group, all of one model, is done.

    Ahead of it is what is in progress and what waits before it in the queue's order.
    """
    last = max(group, key=queue_key)
    model, last_key = last.model, queue_key(last)
    replicas = [replica for replica in queue.replicas if replica.model == model]
    ahead = [one for one in queue.in_progress if one.model == model and one is not last]
    ahead += [one for one in queue.waiting if one.model == model and queue_key(one) < last_key]
    ahead += [one for one in group if one is not last]
    num_each = math.ceil((len(ahead) + 1) / len(replicas))
    # equal requests take equally long: a group is mostly of one kind
    kinds = {
        (one.remaining_steps, row_megapixels(one), one.num_previews): one for one in group
    }.values()
    own_s = max(
        batch_s(replica.step_cost, request, min(replica.max_batch, num_each))
        for replica in replicas
        for request in kinds
    )
    return _work_s(pooled_cost(replicas), ahead) + own_s


def _work_s(cost: StepCost, requests: Sequence[RequestView]) -> float:
    """Return the sum of ``alone_s`` over requests: one look at each, as there may be thousands."""
    steps = [one.num_steps - one.steps_done for one in requests]
    pixels = [one.width_px * one.height_px * (1 + one.uses_guidance) for one in requests]
    pixel_steps = sum(a * b for a, b in zip(steps, pixels, strict=True))
    steps_s = cost.fixed_s * sum(steps) + cost.per_megapixel_s * pixel_steps / 1e6
    if cost.per_squared_megapixel_s:
        squares = [
            one.width_px * one.height_px / 1e12 * p for one, p in zip(requests, pixels, strict=True)
        ]
        steps_s += cost.per_squared_megapixel_s * sum(
            a * b for a, b in zip(steps, squares, strict=True)
        )
    if cost.decode_per_megapixel_s == 0:
        return steps_s
    return steps_s + sum(decodes_s(cost, one) for one in requests)


def _ends_s(num_ends: int, in_flight: Sequence[RequestView], queue: QueueView) -> float:
    """Return the seconds until that many of a client's requests have probably ended."""
    if num_ends > len(in_flight):
        return math.inf
    waiting = {request.request_id for request in queue.waiting}
    by_end = sorted(
        in_flight, key=lambda r: (r.request_id in waiting, r.remaining_steps, queue_key(r))
    )
    return predict_s([by_end[num_ends - 1]], queue)


def drain_s(num_departures: int, queue: QueueView) -> float:
    """Return the seconds until that many waiting requests, of whatever model, are leased."""
    models = sorted({request.model for request in queue.waiting})
    departures = sorted(time_s for model in models for time_s in _departures_s(model, queue))
    return departures[num_departures - 1]


def _departures_s(model: str, queue: QueueView) -> list[float]:
    """Seconds until each waiting request of the model is leased: when places become free."""
    replicas = [replica for replica in queue.replicas if replica.model == model]
    waiting = sorted((r for r in queue.waiting if r.model == model), key=queue_key)
    if not replicas:
        return [math.inf] * len(waiting)
    pool = pooled_cost(replicas)
    running = sorted(
        (r for r in queue.in_progress if r.model == model), key=lambda r: alone_s(pool, r)
    )
    outstanding = [*running, *waiting]
    # there are no more departures than this
    outstanding = outstanding[: len(waiting)]
    drained_s = accumulate(alone_s(pool, request) for request in outstanding)
    # the pool's fluid may be fast, but no request leaves before its own last step in a full batch
    # over batches of a megapixel each
    fastest = min(
        replicas,
        key=lambda r: step_s(r.step_cost, StepWork(float(r.max_batch), float(r.max_batch))),
    )
    completions_s = [
        max(fluid_s, batch_s(fastest.step_cost, request, fastest.max_batch))
        for fluid_s, request in zip(drained_s, outstanding, strict=True)
    ]
    num_free = sum(replica.room for replica in replicas)
    return ([0.0] * num_free + completions_s)[: len(waiting)]


def pooled_cost(replicas: Sequence[ReplicaView]) -> StepCost:
    """Return the cost, per request, of a pool of replicas that all run full batches.

    Exact where the replicas' terms are in proportion, a little optimistic otherwise (a parallel
    sum is superadditive).
    """
    # as share_cost does, for all at once
    return StepCost(
        fixed_s=_parallel([one.step_cost.fixed_s / one.max_batch for one in replicas]),
        per_megapixel_s=_parallel([one.step_cost.per_megapixel_s for one in replicas]),
        per_squared_megapixel_s=_parallel(
            [one.step_cost.per_squared_megapixel_s for one in replicas]
        ),
        decode_per_megapixel_s=_parallel(
            [one.step_cost.decode_per_megapixel_s for one in replicas]
        ),
        source="modelled",
    )


def _parallel(terms_s: Sequence[float]) -> float:
    """Seconds per unit of work of servers that share the work by their speeds."""
    if min(terms_s) <= 0:
        return 0.0
    return 1 / sum(1 / term_s for term_s in terms_s)
