"""Which waiting requests a polling replica leases now.

Replicas pull, so routing is a choice of how many requests from the head of the queue the polling
replica may lease: it leaves to its peers what they would finish sooner. Which ones it gets is for
:mod:`ray_cluster.policies.leasing.placement` to say: the first ones, except for what is resident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.admission.load import (
    NUM_AMOUNTS,
    NUM_PLAIN,
    Amounts,
    Floats,
    load_of,
    prices_s,
)
from ray_cluster.policies.costs.cost_model import share_cost
from ray_cluster.policies.leasing.placement import (
    WINDOW,
    MergedReplica,
    Placement,
    Residency,
    place,
    place_merged,
)
from ray_cluster.policies.types import ReplicaView, RequestView

# waiting requests that are dealt out where some replicas cannot make all of them
_MOST_DEALT = 256
# later than any end, and finite
_LATEST_S = 1e12


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """The R replicas of one model, a row each: the choice is made for every poll.

    Attributes:
        levels_s: [R], replica seconds that the requests they hold still take in full batches.
        rooms: [R], free slots; 0 for a replica that is not expected to poll soon.
        prices_s: [R, L], as :func:`shared_prices` has them.
        residency: None where nothing is resident on any of them.
        merged: the sets of LoRAs that they are merged with, empty for those that are not; empty
            where none is.
    """

    levels_s: Floats
    rooms: npt.NDArray[np.int64]
    prices_s: Floats
    residency: Residency | None = None
    merged: Sequence[str] = ()

    def merged_replica(self, row: int) -> MergedReplica | None:
        """Return a merged replica among its peers; None for one that is not merged."""
        if not self.merged or not self.merged[row]:
            return None
        peer_rooms: dict[str, int] = {}
        for peer, own in enumerate(self.merged):
            if peer != row:
                peer_rooms[own] = peer_rooms.get(own, 0) + int(self.rooms[peer])
        return MergedReplica(self.merged[row], int(self.rooms[row]), peer_rooms)


def shared_prices(view: ReplicaView) -> Amounts:
    """Return the seconds of each amount of a load on a replica with full batches, [L]."""
    found = np.zeros(NUM_AMOUNTS)
    prices = prices_s(share_cost(view.step_cost, view.max_batch))
    found[: len(prices)] = prices
    return found


def choose_leases(
    queue: Sequence[RequestView], row: int, table: ReplicaTable, now_s: float
) -> Placement:
    """Return which waiting requests a replica leases.

    Args:
        queue: waiting requests of the replicas' model, in the queue's order.
        row: of the replica that polls.
        table: it and its peers.
        now_s: present instant on the clock of the deadlines.
    """
    replica = table.merged_replica(row)
    if replica is None:
        return place(queue, count_leases(queue, row, table), row, table.residency, now_s)
    near = queue[: replica.room + WINDOW - 1]
    return place_merged(near, count_leases(near, row, table), replica, table.residency, now_s)


def count_leases(queue: Sequence[RequestView], row: int, table: ReplicaTable) -> int:
    """Return how many of the waiting requests a replica leases.

    Requests that it cannot make are the others'. Where enough waits for every free slot of the
    model, and all replicas can make all of it, the replica fills its own slots. Else it fills up
    to its fair level and stops where more than half of the next request would lie above. The
    replica that the next request is dealt to gets it when it polls, so every request is leased as
    long as there is a free slot.

    The arguments are those of :func:`choose_leases`.
    """
    room = int(table.rooms[row])
    if len(queue) >= int(table.rooms.sum()) and not any(table.merged):
        # every slot is filled, whichever replica polls first
        return room
    works_s = works_of(queue[: _MOST_DEALT if table.merged else None], table)
    fair_s = fair_level_s(works_s, row, table)
    level_s = float(table.levels_s[row])
    own_s = works_s[:, row]
    own_s = own_s[own_s < np.inf][:room]
    for taken, work_s in enumerate(own_s.tolist()):
        if level_s + work_s / 2 > fair_s:
            return taken
        level_s += work_s
    return len(own_s)


def soonest_first(request: RequestView, table: ReplicaTable) -> Iterator[int]:
    """Rows with free slots, by when they would end a request.

    Of equals, those with most of what it needs come first, then those of lower number. Merged ones
    that cannot make it come last: they learn that it waits.
    """
    ends_s = table.levels_s + np.nan_to_num(works_of([request], table)[0], posinf=_LATEST_S)
    ends_s[table.rooms <= 0] = np.inf
    if table.residency is not None and request.needs:
        num_here = table.residency.num_here(request, len(ends_s))
        yield from (row for row in np.lexsort((-num_here, ends_s)).tolist() if ends_s[row] < np.inf)
        return
    for _ in range(len(ends_s)):
        row = int(ends_s.argmin())
        if ends_s[row] == np.inf:
            return
        yield row
        ends_s[row] = np.inf


def works_of(queue: Sequence[RequestView], table: ReplicaTable) -> Floats:
    """Return the seconds of each request in full batches of each replica, [requests, R].

    They are infinite where a replica is merged with other LoRAs.
    """
    amounts = np.array([load_of(one) for one in queue], dtype=float).reshape(-1, NUM_AMOUNTS)
    prices = table.prices_s
    works_s: Floats = amounts[:, :NUM_PLAIN] @ prices[:, :NUM_PLAIN].T
    extra = amounts[:, NUM_PLAIN:]
    if extra.any():
        works_s = works_s + extra @ prices[:, NUM_PLAIN:].T
    for row, merged in enumerate(table.merged):
        if merged:
            works_s[[one.lora_set != merged for one in queue], row] = np.inf
    return works_s


def fair_level_s(works_s: Floats, row: int, table: ReplicaTable) -> float:
    """Return the replica seconds that a replica holds once the queue is dealt out.

    Greedy list scheduling: each request, in order, goes to where it would end first among those
    with free slots, ties to the one that polls. So a full peer blocks nobody, and a slow one gets
    little. The dealing stops when the replica has no slot left.

    Args:
        works_s: seconds of each request on each replica, [requests, R].
        row: of the replica.
        table: it and its peers.
    """
    rooms = table.rooms.copy()
    # nothing ends on a replica that is full
    levels_s = np.where(rooms > 0, table.levels_s, np.inf)
    level_s = float(table.levels_s[row])
    for work_s in works_s:
        if rooms[row] <= 0:
            break
        ends_s = levels_s + work_s
        soonest = int(ends_s.argmin())
        if ends_s[soonest] == np.inf:
            # none of those with free slots can make it
            continue
        if ends_s[row] <= ends_s[soonest]:
            soonest = row
            level_s = float(ends_s[row])
        rooms[soonest] -= 1
        levels_s[soonest] = ends_s[soonest] if rooms[soonest] > 0 else np.inf
    return level_s
