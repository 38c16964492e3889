"""Which waiting requests a polling replica leases now.

Replicas pull, so routing is a choice of how far down the queue the one that asks may go. It takes
a prefix of the queue, never skips, and leaves the rest to peers that would finish it sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.load import load_of
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.types import ReplicaView, RequestView


def choose_leases(
    waiting: Sequence[RequestView], replica: ReplicaView, peers: Sequence[ReplicaView]
) -> tuple[str, ...]:
    """Return the ids that the replica leases, in queue order: a prefix of its model's queue.

    Where enough waits for every place there is, the replica fills its own. Else the prefix fills it
    up to its fair level and stops where more than half of the next request would lie above. Whoever
    the next request is dealt to gets it when it polls, so every request is taken as long as
    somebody has room.

    Args:
        waiting: waiting requests, in any order; other models are ignored.
        replica: the one that polls.
        peers: replicas that can be counted on to poll soon: leave out silent ones. Other models
            are ignored.
    """
    queue = sorted((r for r in waiting if r.model == replica.model), key=queue_key)
    rivals = [peer for peer in peers if peer.model == replica.model]
    if len(queue) >= replica.room + sum(rival.room for rival in rivals):
        # every place is filled, whoever asks first
        return tuple(one.request_id for one in queue[: replica.room])
    everyone = [replica, *sorted(rivals, key=lambda rival: rival.replica_id)]
    works_s = works_of(queue, everyone)
    fair_s = fair_level_s(works_s, everyone)
    taken: list[str] = []
    level_s = replica.leased_work_s
    for request, work_s in zip(queue[: replica.room], works_s[:, 0], strict=False):
        if level_s + work_s / 2 > fair_s:
            break
        taken.append(request.request_id)
        level_s += work_s
    return tuple(taken)


def works_of(
    queue: Sequence[RequestView], replicas: Sequence[ReplicaView]
) -> npt.NDArray[np.float64]:
    """Return the replica seconds of each request on each replica, ``[requests, replicas]``.

    As :func:`share_s` does, for all at once: the choice is made for every poll.
    """
    loads = [load_of(one) for one in queue]
    amounts = np.array(
        [
            (one.steps, one.step_pixels / 1e6, one.step_squares / 1e12, one.decode_pixels / 1e6)
            for one in loads
        ]
    ).reshape(len(queue), 4)
    prices_s = np.array(
        [
            (
                one.step_cost.fixed_s / one.max_batch,
                one.step_cost.per_megapixel_s,
                one.step_cost.per_squared_megapixel_s,
                one.step_cost.decode_per_megapixel_s,
            )
            for one in replicas
        ]
    )
    works_s: npt.NDArray[np.float64] = amounts @ prices_s.T
    return works_s


def fair_level_s(works_s: npt.NDArray[np.float64], replicas: Sequence[ReplicaView]) -> float:
    """Return the replica seconds that the first replica holds once the queue is dealt out.

    Greedy list scheduling: each request, in order, goes to where it would end first among those
    with room, ties to the first. So a full peer blocks nobody, and a slow one gets little. The
    dealing stops when the first replica has no room left.

    Args:
        works_s: seconds of each request on each replica, ``[requests, replicas]``.
    """
    levels_s = np.array([one.leased_work_s for one in replicas], dtype=float)
    rooms = np.array([one.room for one in replicas])
    for work_s in works_s:
        if rooms[0] == 0:
            break
        ends_s = np.where(rooms > 0, levels_s + work_s, np.inf)
        soonest = int(ends_s.argmin())
        levels_s[soonest] = ends_s[soonest]
        rooms[soonest] -= 1
    return float(levels_s[0])
