"""Which waiting requests a polling replica leases now.

Replicas pull, so routing is a choice of how far down the queue the one that asks may go. It takes
a prefix of the queue, never skips, and leaves the rest to peers that would finish it sooner.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ray_cluster.policies.cost_model import row_megapixels, share_s
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.types import ReplicaView, RequestView


def choose_leases(
    waiting: Sequence[RequestView], replica: ReplicaView, peers: Sequence[ReplicaView]
) -> tuple[str, ...]:
    """Return the ids that the replica leases, in queue order: a prefix of its model's queue.

    The prefix fills the replica up to its fair level and stops where more than half of the next
    request would lie above. Whoever the next request is dealt to gets it when it polls, so every
    request is taken as long as somebody has room.

    Args:
        waiting: waiting requests, in any order; other models are ignored.
        replica: the one that polls.
        peers: replicas that can be counted on to poll soon: leave out silent ones. Other models
            are ignored.
    """
    queue = sorted((r for r in waiting if r.model == replica.model), key=queue_key)
    rivals = [peer for peer in peers if peer.model == replica.model]
    fair_s = fair_level_s(queue, replica, rivals)
    taken: list[str] = []
    level_s = replica.leased_work_s
    for request in queue[: replica.room]:
        work_s = share_s(replica.step_cost, request, replica.max_batch)
        if level_s + work_s / 2 > fair_s:
            break
        taken.append(request.request_id)
        level_s += work_s
    return tuple(taken)


def fair_level_s(
    queue: Sequence[RequestView], replica: ReplicaView, rivals: Sequence[ReplicaView]
) -> float:
    """Return the replica seconds that ``replica`` holds once the queue is dealt out.

    Greedy list scheduling: each request, in order, goes to where it would end first among those
    with room, ties to ``replica``. So a full peer blocks nobody, and a slow one gets little. The
    dealing stops when ``replica`` has no room left.
    """
    everyone = [replica, *sorted(rivals, key=lambda rival: rival.replica_id)]
    # as share_cost does, for all at once
    fixed_s = np.array([one.step_cost.fixed_s / one.max_batch for one in everyone])
    per_megapixel_s = np.array([one.step_cost.per_megapixel_s for one in everyone], dtype=float)
    levels_s = np.array([one.leased_work_s for one in everyone], dtype=float)
    rooms = np.array([one.room for one in everyone])
    for request in queue:
        if rooms[0] == 0:
            break
        step_shares_s = fixed_s + per_megapixel_s * row_megapixels(request)
        ends_s = np.where(rooms > 0, levels_s + request.remaining_steps * step_shares_s, np.inf)
        first = int(ends_s.argmin())
        levels_s[first] = ends_s[first]
        rooms[first] -= 1
    return float(levels_s[0])
