"""Which leased requests are preempted for a more urgent group, to go on later from their states.

Where all slots of all replicas are taken, a group waits for the first request to end, however
urgent the group is. If it would be late for that, the requests that stand last in the queue's order
may be preempted: they are released at the next step boundary, wait where they stood in the queue's
order, and go on from their states wherever they are leased next. This is done only if the group is
first in the queue, is in time then, and makes nobody late, and never where a request would start
over. It ends: a request is preempted only for one before it in the queue's order, which does not
change while a request lives, except when it ages (:mod:`ray_cluster.policies.leasing.ordering`),
and at most ``MOST_PREEMPTIONS`` times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.admission.forecast import ForecastView
from ray_cluster.policies.admission.replica_simulation import ForecastReplica, Leased
from ray_cluster.policies.leasing.ordering import queue_key
from ray_cluster.policies.types import RequestView

MOST_PREEMPTIONS = 4
# choices of victims that are tried: each costs a forecast
_MOST_TRIED = 2
# a request in its last step is done before it could be released
_FEWEST_STEPS_LEFT = 2


@dataclass(frozen=True, slots=True)
class Exchange:
    """Slots that change hands.

    Attributes:
        pairs: ids of the preempted request and of the one that gets its slot.
        view: the cell after that.
    """

    pairs: tuple[tuple[str, str], ...]
    view: ForecastView


def exchanges(group: Sequence[RequestView], view: ForecastView) -> Iterator[Exchange]:
    """Ways to give each of a group a slot, if none is free: the last in the queue's order first.

    Args:
        group: part of the view's queue.
        view: the cell.
    """
    if not group or any(_num_free(one) > 0 for one in view.replicas):
        return
    ordered = sorted(group, key=queue_key)
    own = {one.request_id for one in group}
    if any(one.request_id not in own for one in view.queue[: len(own)]):
        return
    last = queue_key(ordered[-1])
    held = [one for replica in view.replicas if replica.resumes for one in replica.requests]
    candidates = sorted(
        (one for one in held if _is_preemptible(one) and queue_key(one) > last),
        key=queue_key,
        reverse=True,
    )
    for first in range(min(_MOST_TRIED, len(candidates) - len(group) + 1)):
        victims = candidates[first : first + len(group)]
        heirs = dict(zip((one.request_id for one in victims), ordered, strict=True))
        pairs = tuple((victim, heir.request_id) for victim, heir in heirs.items())
        waiting = [*(one for one in view.queue if one.request_id not in own), *victims]
        replicas = [_exchanged(one, heirs) for one in view.replicas]
        queue = sorted(waiting, key=queue_key)
        yield Exchange(pairs, replace(view, replicas=replicas, queue=queue))


def _num_free(replica: ForecastReplica) -> int:
    return replica.max_in_flight - len(replica.requests)


def _is_preemptible(held: RequestView) -> bool:
    return held.num_preemptions < MOST_PREEMPTIONS and held.remaining_steps >= _FEWEST_STEPS_LEFT


def _exchanged(replica: ForecastReplica, heirs: dict[str, RequestView]) -> ForecastReplica:
    """A replica whose part of the victims is replaced by their heirs, which begin now."""
    gone = [one.request_id for one in replica.requests if one.request_id in heirs]
    if not gone:
        return replica
    return replace(
        replica,
        held=[one for one in replica.held if one.request_id not in gone],
        leased=[
            *(one for one in replica.leased if one.request.request_id not in gone),
            *(Leased(heirs[victim], 0.0) for victim in gone),
        ],
    )
