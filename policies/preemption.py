"""Who gives a place on a replica to somebody more urgent, and goes on later from where it was.

A replica holds so many requests. Once all places are taken, whoever comes waits for the first of
these to end, however early it is due. So a group that would be late that way may be given the
places of those that the queue's order has last: they are handed back at the next step boundary,
wait in the one queue at the place that they had, and whoever leases them next goes on from their
states. It is done only if the group is first in the queue, is in time then, and nobody is made late
by it. There is an end to it: nobody gives way to who stands behind in the queue's order, which
never changes for a request but when it ages (:mod:`ray_cluster.policies.ordering`), and nobody does
so more than ``MOST_PREEMPTIONS`` times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ray_cluster.policies.forecast import ForecastView
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.replica_course import Leased, ReplicaScene
from ray_cluster.policies.types import RequestView

# after which a request keeps its place until it ends
MOST_PREEMPTIONS = 4
# choices of who gives way that are looked at: each costs a forecast
_MOST_TRIED = 2
# a request in its last step is done before it could be handed back
_FEWEST_STEPS_LEFT = 2


@dataclass(frozen=True, slots=True)
class Exchange:
    """Places that change hands.

    Attributes:
        pairs: ids of who gives a place and of who gets it.
        scene: everything as it is then.
    """

    pairs: tuple[tuple[str, str], ...]
    scene: ForecastView


def exchanges(group: Sequence[RequestView], scene: ForecastView) -> Iterator[Exchange]:
    """Ways to give each of a group a place, if there is none left: the gentlest first.

    Args:
        group: waits, or is to be let in; part of the scene's line.
        scene: everything that is there of their model, the line in the queue's order.
    """
    if not group or any(_num_free(one) > 0 for one in scene.replicas):
        return
    ordered = sorted(group, key=queue_key)
    own = {one.request_id for one in group}
    if any(one.request_id not in own for one in scene.line[: len(own)]):
        return
    last = queue_key(ordered[-1])
    held = [one for replica in scene.replicas for one in replica.requests]
    # who comes last gives way first
    willing = sorted(
        (one for one in held if _may_give_way(one) and queue_key(one) > last),
        key=queue_key,
        reverse=True,
    )
    for first in range(min(_MOST_TRIED, len(willing) - len(group) + 1)):
        victims = willing[first : first + len(group)]
        heirs = dict(zip((one.request_id for one in victims), ordered, strict=True))
        pairs = tuple((victim, heir.request_id) for victim, heir in heirs.items())
        line = [*(one for one in scene.line if one.request_id not in own), *victims]
        replicas = [_exchanged(one, heirs) for one in scene.replicas]
        yield Exchange(pairs, replace(scene, replicas=replicas, line=sorted(line, key=queue_key)))


def _num_free(replica: ReplicaScene) -> int:
    return replica.max_in_flight - len(replica.requests)


def _may_give_way(held: RequestView) -> bool:
    return held.num_preemptions < MOST_PREEMPTIONS and held.remaining_steps >= _FEWEST_STEPS_LEFT


def _exchanged(replica: ReplicaScene, heirs: dict[str, RequestView]) -> ReplicaScene:
    """A replica once its part of the victims has given way to their heirs, who begin now."""
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
