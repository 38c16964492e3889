"""Which waiting requests a polling replica leases now.

Replicas pull, so routing is a choice of how far down the queue the one that asks may go. It takes
a prefix of the queue, never skips, and leaves the rest to peers that would finish it sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ray_cluster.policies.cost_model import share_s
from ray_cluster.policies.ordering import queue_key
from ray_cluster.policies.types import ReplicaView, RequestView


@dataclass(frozen=True, slots=True)
class FairShare:
    """What greedy list scheduling gives one replica.

    Attributes:
        num_requests: requests it gets.
        level_s: replica seconds it then holds.
    """

    num_requests: int
    level_s: float


def choose_leases(
    waiting: Sequence[RequestView], replica: ReplicaView, peers: Sequence[ReplicaView]
) -> tuple[str, ...]:
    """Return the ids that the replica leases, in queue order: a prefix of its model's queue.

    Its fair share is what it would get if each request, in order, went to the replica that would
    finish it first; replicas without room take no part, so a full peer blocks nobody, and a slow
    peer gets little. The prefix stops where more than half of the next request would lie above
    the level of that share. Whoever the first request belongs to gets at least that one when it
    polls, so every request is taken as long as somebody has room.

    Args:
        waiting: waiting requests, in any order; other models are ignored.
        replica: the one that polls.
        peers: replicas that can be counted on to poll soon: leave out silent ones. Other models
            are ignored.
    """
    queue = sorted((r for r in waiting if r.model == replica.model), key=queue_key)
    rivals = [peer for peer in peers if peer.model == replica.model and peer.room > 0]
    share = fair_share(queue, replica, rivals)
    if share.num_requests == 0:
        return ()
    taken: list[str] = []
    level_s = replica.leased_work_s
    for request in queue[: replica.room]:
        work_s = share_s(replica.step_cost, request, replica.max_batch)
        if taken and level_s + work_s / 2 > share.level_s:
            break
        taken.append(request.request_id)
        level_s += work_s
    return tuple(taken)


def fair_share(
    queue: Sequence[RequestView], replica: ReplicaView, rivals: Sequence[ReplicaView]
) -> FairShare:
    """Deal the queue out, each request to where it ends first; return what ``replica`` gets.

    Ties go to ``replica``; the dealing stops when it has no room left.
    """
    everyone = [replica, *sorted(rivals, key=lambda rival: rival.replica_id)]
    levels_s = [one.leased_work_s for one in everyone]
    rooms = [one.room for one in everyone]
    for request in queue:
        if rooms[0] == 0:
            break
        ends_s = [
            level_s + share_s(one.step_cost, request, one.max_batch) if room else float("inf")
            for one, level_s, room in zip(everyone, levels_s, rooms, strict=True)
        ]
        first = ends_s.index(min(ends_s))
        levels_s[first] = ends_s[first]
        rooms[first] -= 1
    return FairShare(num_requests=replica.room - rooms[0], level_s=levels_s[0])
