"""Which waiting requests a replica leases: by the queue's order first, then by what is resident.

A replica that leases the first request of the queue fetches the adapters and the template that it
lacks. If a peer has these, and a request close behind has all that it needs on this replica, that
one is leased first, which saves a transfer (affinity for what InstGenIE, section 4.4, and
SwiftDiffusion, section 2, fetch). The cost to the request that is passed over is bounded:

    At most ``MOST_PASSES`` later requests are leased before it, none of another priority, and none
    unless it could still be in time if it began when that one ends.

No slot stays empty for this: where nothing may be leased first, the queue's order holds.

A replica whose model is merged with a set of LoRAs can make no other images. It leases requests of
that set alone, and passes over the others within the same bounds. Beyond them, or where no other
replica will take these soon, it is told so, and puts its model's own weights back at once: a set
that is asked for often keeps nobody else waiting.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from ray_cluster.policies.costs.cost_model import decode_s, encode_s, own_s
from ray_cluster.policies.types import MOST_PASSES, RequestView, StepCost

_FIELDS = tuple(one.name for one in fields(RequestView))
_VALUES, _NUM_PASSES = attrgetter(*_FIELDS), _FIELDS.index("num_passes")
# requests that are considered for one lease, however long the queue is
WINDOW = 16


@dataclass(frozen=True, slots=True)
class Residency:
    """What is resident on the replicas of one model, and what a step costs there.

    Attributes:
        cost: each term of the replica that is slowest in it.
        max_batch: most requests that one of them steps together.
        holders: rows of the replicas by the ids of what is resident on them.
    """

    cost: StepCost
    max_batch: int
    holders: Mapping[str, Collection[int]] = field(default_factory=dict)

    def is_here(self, request: RequestView, row: int) -> bool:
        """Whether all that a request needs is on a replica."""
        return all(row in self.holders.get(need, ()) for need in request.needs)

    def is_elsewhere(self, request: RequestView, row: int) -> bool:
        """Whether something that a request lacks on a replica is on a peer."""
        found = (self.holders.get(need, ()) for need in request.needs)
        return any(rows and row not in rows for rows in found)

    def num_here(self, request: RequestView, num_replicas: int) -> npt.NDArray[np.int64]:
        """Return how much of what a request needs is on each replica, [R]."""
        found = np.zeros(num_replicas, dtype=np.int64)
        for need in request.needs:
            found[list(self.holders.get(need, ()))] += 1
        return found

    def remainder_s(self, request: RequestView) -> float:
        """Return the seconds that a request takes from now in a full batch of its like."""
        step_s = self.cost.fixed_s + self.max_batch * own_s(self.cost, request)
        coding_s = encode_s(self.cost, request) + decode_s(self.cost, request)
        return request.remaining_steps * step_s + coding_s


@dataclass(frozen=True, slots=True)
class Placement:
    """What a replica leases.

    Attributes:
        leased: ids of waiting requests, the first one first.
        passed: ids of those that stay though later ones are leased, once for each of these.
        others_wait: whether a merged replica should put its model's own weights back, as some wait
            that it cannot make.
    """

    leased: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    others_wait: bool = False


NOTHING = Placement()


@dataclass(frozen=True, slots=True)
class MergedReplica:
    """A replica whose model is merged with a set of LoRAs, and the other ones of the model.

    Attributes:
        lora_set: the set.
        room: its free slots.
        peer_rooms: free slots of the others by what they are merged with; empty for those that are
            not merged. A set without a replica is missing.
    """

    lora_set: str
    room: int
    peer_rooms: Mapping[str, int]

    def leaves(self, request: RequestView, *, has_room: bool) -> bool:
        """Whether a request that it cannot make may be left to the others.

        Args:
            has_room: whether slots of its own stay free meanwhile.
        """
        rooms = [self.peer_rooms[one] for one in ("", request.lora_set) if one in self.peer_rooms]
        return bool(rooms) and (sum(rooms) > 0 or not has_room)


def place(
    queue: Sequence[RequestView],
    num_leases: int,
    row: int,
    residency: Residency | None,
    now_s: float,
) -> Placement:
    """Return which waiting requests a replica leases.

    Args:
        queue: waiting requests of the replica's model, in the queue's order.
        num_leases: how many it leases, or all if fewer wait.
        row: of the replica.
        residency: None where nothing is resident on any replica.
        now_s: present instant on the clock of the deadlines.
    """
    if residency is None or not residency.holders:
        return Placement(tuple([one.request_id for one in queue[:num_leases]]))
    leased, passed = [], []
    left = list(queue[: num_leases + WINDOW - 1])
    for _ in range(min(num_leases, len(left))):
        choice = _choice(left[:WINDOW], row, residency, now_s)
        leased.append(left.pop(choice).request_id)
        passed += [one.request_id for one in left[:choice]]
        left[:choice] = map(passed_over, left[:choice])
    return Placement(tuple(leased), tuple(passed))


def place_merged(
    queue: Sequence[RequestView],
    num_leases: int,
    replica: MergedReplica,
    residency: Residency | None,
    now_s: float,
) -> Placement:
    """Return which waiting requests a merged replica leases: none but those of its set.

    The arguments are those of :func:`place`.
    """
    leased: list[str] = []
    passed: list[str] = []
    others: list[RequestView] = []
    is_stopped = False
    for one in queue[: num_leases + WINDOW - 1]:
        if one.lora_set != replica.lora_set:
            others.append(one)
            continue
        if len(leased) == num_leases:
            break
        if is_stopped := not _may_pass(others, one, residency, now_s):
            break
        leased.append(one.request_id)
        passed += [other.request_id for other in others]
        others = list(map(passed_over, others))
    has_room = replica.room > len(leased)
    others_wait = any(is_stopped or not replica.leaves(one, has_room=has_room) for one in others)
    return Placement(tuple(leased), tuple(passed), others_wait)


def _may_pass(
    others: Sequence[RequestView], later: RequestView, residency: Residency | None, now_s: float
) -> bool:
    """Whether a later request may be leased before all of these."""
    if any(one.num_passes >= MOST_PASSES or one.priority != later.priority for one in others):
        return False
    if residency is None:
        return True
    until_s = now_s + residency.remainder_s(later)
    return all(until_s + residency.remainder_s(one) <= one.deadline_s for one in others)


def passed_over(request: RequestView) -> RequestView:
    """Return a request once a later one was leased before it."""
    # forecasts do it so often that `replace`, which looks at each field by name, takes most of them
    values = list(_VALUES(request))
    values[_NUM_PASSES] += 1
    return RequestView(*values)


def _choice(window: Sequence[RequestView], row: int, residency: Residency, now_s: float) -> int:
    # seconds that those passed over can wait before they have to begin
    spare_s = math.inf
    for index, one in enumerate(window):
        if one.priority != window[0].priority:
            break
        if residency.is_here(one, row):
            return index if residency.remainder_s(one) <= spare_s else 0
        if not (one.passes_left and residency.is_elsewhere(one, row)):
            break
        spare_s = min(spare_s, one.deadline_s - now_s - residency.remainder_s(one))
    return 0
