"""Which waiting requests a polling replica leases now.

Replicas pull, so routing is a choice of how far down the queue the one that asks may go: it leaves
to peers what they would finish sooner. Which requests it gets of those that are left to it is the
business of :mod:`ray_cluster.policies.placement`: the first ones, but for what is resident.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.load import Floats, Load, load_of
from ray_cluster.policies.placement import Placement, Residency, place
from ray_cluster.policies.types import ReplicaView, RequestView

Prices = tuple[float, float, float, float, float, float, float, float, float]
# of what every request takes, and of that with what add-ons and masks change
_NUM_PLAIN = 4
NUM_PRICES = 9


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """The R replicas of one model, a row each: the choice is made for every poll.

    Attributes:
        levels_s: [R], replica seconds that the requests they hold still take in full batches.
        rooms: [R], requests they have room for; 0 for one that can't be counted on to poll soon.
        prices_s: [R, 9], as :func:`prices_of` has them.
        residency: None where nothing is resident on any of them.
    """

    levels_s: Floats
    rooms: npt.NDArray[np.int64]
    prices_s: Floats
    residency: Residency | None = None


def prices_of(view: ReplicaView) -> Prices:
    """Return what a replica takes for each of :func:`_amounts_of`, in seconds."""
    cost = view.step_cost
    linear_s, squared_s = cost.per_megapixel_s, cost.per_squared_megapixel_s
    return (
        cost.fixed_s / view.max_batch,
        linear_s,
        squared_s,
        cost.decode_per_megapixel_s,
        cost.control_share * linear_s,
        cost.control_share * squared_s,
        cost.lora_share * linear_s,
        -cost.spared_share * linear_s,
        -cost.spared_share * squared_s,
    )


def _amounts_of(load: Load) -> Prices:
    """Steps, step megapixels, their squares, decoded megapixels; add-ons, and what masks spare."""
    return (
        load.steps,
        load.step_pixels / 1e6,
        load.step_squares / 1e12,
        load.decode_pixels / 1e6,
        load.control_pixels / 1e6,
        load.control_squares / 1e12,
        load.lora_pixels / 1e6,
        load.spared_pixels / 1e6,
        load.spared_squares / 1e12,
    )


def table_of(views: Sequence[ReplicaView]) -> ReplicaTable:
    """Return the table of replicas, all of which can be counted on."""
    return ReplicaTable(
        np.array([one.leased_work_s for one in views], dtype=float),
        np.array([one.room for one in views], dtype=np.int64),
        np.array([prices_of(one) for one in views]).reshape(len(views), NUM_PRICES),
    )


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
    return place(queue, count_leases(queue, row, table), row, table.residency, now_s)


def count_leases(queue: Sequence[RequestView], row: int, table: ReplicaTable) -> int:
    """Return how many of the waiting requests a replica leases.

    Where enough waits for every place there is, the replica fills its own. Else the prefix fills it
    up to its fair level and stops where more than half of the next request would lie above. Whoever
    the next request is dealt to gets it when it polls, so every request is taken as long as
    somebody has room.

    Args:
        queue: waiting requests of the replicas' model, in the queue's order.
        row: of the replica that polls.
        table: it and its peers.
    """
    room = int(table.rooms[row])
    if len(queue) >= int(table.rooms.sum()):
        # every place is filled, whoever asks first
        return room
    works_s = works_of(queue[:], table)
    fair_s = fair_level_s(works_s, row, table)
    level_s = float(table.levels_s[row])
    for taken, work_s in enumerate(works_s[:room, row].tolist()):
        if level_s + work_s / 2 > fair_s:
            return taken
        level_s += work_s
    return min(room, len(queue))


def soonest_first(request: RequestView, table: ReplicaTable) -> Iterator[int]:
    """Rows that have room, by when they would end a request.

    Of those that would end it at the same time, those with most of what it needs come first; else
    ties are by their number.
    """
    ends_s = table.levels_s + works_of([request], table)[0]
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
    """Return the seconds of each request in full batches of each replica, [requests, R]."""
    amounts = np.array([_amounts_of(load_of(one)) for one in queue]).reshape(-1, NUM_PRICES)
    prices_s = table.prices_s
    works_s: Floats = amounts[:, :_NUM_PLAIN] @ prices_s[:, :_NUM_PLAIN].T
    extra = amounts[:, _NUM_PLAIN:]
    return works_s + extra @ prices_s[:, _NUM_PLAIN:].T if extra.any() else works_s


def fair_level_s(works_s: Floats, row: int, table: ReplicaTable) -> float:
    """Return the replica seconds that a replica holds once the queue is dealt out.

    Greedy list scheduling: each request, in order, goes to where it would end first among those
    with room, ties to the one that polls. So a full peer blocks nobody, and a slow one gets little.
    The dealing stops when the replica has no room left.

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
        if ends_s[row] <= ends_s[soonest]:
            soonest = row
            level_s = float(ends_s[row])
        rooms[soonest] -= 1
        levels_s[soonest] = ends_s[soonest] if rooms[soonest] > 0 else np.inf
    return level_s
