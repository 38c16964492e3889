"""The live dispatch core on virtual time, with replicas that poll it as live ones do.

A free replica always has a poll open, so it is answered as soon as there is something to say, and
polls anew when that has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.held_polls import says_something
from ray_cluster.policies.types import Offer
from ray_cluster.protocol.leases import Poll, PollReply, ReplicaEvent
from ray_cluster.protocol.outcomes import Outcome
from ray_cluster.requests import ImageRequest
from ray_cluster.simulator.events import EventQueue, Timer
from ray_cluster.simulator.replica import SimulatedReplica

Keep = Callable[[Outcome], None]

# once the silence is over, until the core has noticed
_LOOK_AGAIN_S = 0.1


class SimulatedDispatcher:
    """Carries messages between replicas and a dispatch core.

    Args:
        core: the production one.
        keep: told how every request ended.
        timeout_s: silence after which the core takes a replica for dead.
        one_way_s: seconds that a message takes.
    """

    def __init__(
        self,
        core: DispatchCore,
        events: EventQueue,
        *,
        keep: Keep,
        timeout_s: float,
        one_way_s: float = 0.0,
    ) -> None:
        self.core = core
        self._events = events
        self._keep = keep
        self._timeout_s = timeout_s
        self._one_way_s = one_way_s
        self._replicas: dict[str, SimulatedReplica] = {}
        self._epochs: dict[str, int] = {}
        self._held: dict[str, Timer] = {}

    def register(self, replica: SimulatedReplica) -> None:
        """Take a replica in, and have it poll."""
        self._replicas[replica.replica_id] = replica
        epoch = self.core.register(replica.registration, self._events.now_s)
        self._epochs[replica.replica_id] = epoch
        self._settle(self.core.take_outcomes())
        self._poll(replica)

    def forget(self, replica_id: str) -> None:
        """Let a replica fall silent; the core finds out by itself."""
        del self._replicas[replica_id]
        self._let_go(replica_id)
        self._look_for(replica_id)

    def _look_for(self, replica_id: str) -> None:
        """Look after the silence that counts as death; what was on its way may put that off."""
        record = self.core.replicas.get(replica_id)
        if record is None or replica_id in self._replicas:
            return
        due_s = record.heard_s + self._timeout_s
        if due_s > self._events.now_s:
            self._events.at(due_s, partial(self._look_for, replica_id))
            return
        self._expire()
        if replica_id in self.core.replicas:
            self._events.after(_LOOK_AGAIN_S, partial(self._look_for, replica_id))

    def unregister(self, replica_id: str) -> None:
        """Let a replica go that says so itself; the core hears it at once."""
        del self._replicas[replica_id]
        self._let_go(replica_id)
        self.core.unregister(replica_id, self._events.now_s)
        self._settle(self.core.take_outcomes())
        self._wake()

    def poll_anew(self, replica_id: str) -> None:
        """Have a replica say again how much room it has; who is being answered will anyway."""
        if replica_id in self._held:
            self._poll(self._replicas[replica_id])

    def offer(self, requests: Sequence[ImageRequest]) -> Offer:
        """Offer a group, as for a job: nobody need wait for it."""
        offer = self.core.offer(requests, self._events.now_s, client=None)
        if offer.accepted:
            self._wake()
        return offer

    def report(self, replica_id: str, told: Sequence[ReplicaEvent]) -> None:
        """Take in what a replica says, and its next poll."""
        self._send(partial(self._hear, replica_id, told))

    def _send(self, act: Callable[[], None]) -> None:
        """Have something happen when a message has arrived, which may be at once."""
        if self._one_way_s:
            self._events.after(self._one_way_s, act)
        else:
            act()

    def _hear(self, replica_id: str, told: Sequence[ReplicaEvent]) -> None:
        outcomes, _ = self.core.report(replica_id, told, self._events.now_s)
        self._settle(outcomes)
        self.poll_anew(replica_id)

    def _poll(self, replica: SimulatedReplica) -> None:
        """Answer a replica's poll, or hold it."""
        name = replica.replica_id
        if self._replicas.get(name) is not replica:
            return
        self._let_go(name)
        done = replica.steps_done_by_id()
        poll = Poll(name, self._epochs[name], replica.num_free, done)
        reply = self.core.poll(poll, self._events.now_s)
        self._settle(self.core.take_outcomes())
        if says_something(reply):
            self._answer(replica, reply)
            if reply.leases:
                self._wake()
            return
        self._held[name] = self._events.after(self.core.hold_s, partial(self._poll, replica))

    def _answer(self, replica: SimulatedReplica, reply: PollReply) -> None:
        self._events.after(self._one_way_s, partial(self._deliver, replica, reply))

    def _deliver(self, replica: SimulatedReplica, reply: PollReply) -> None:
        if self._replicas.get(replica.replica_id) is not replica:
            return
        replica.abort(reply.aborts)
        replica.give_way(reply.preempted)
        replica.take(reply.leases)
        self._send(partial(self._poll, replica))

    def _wake(self) -> None:
        """Ask those that hold a poll, in the core's order, until nobody takes any more."""
        now_s = self._events.now_s
        for name in self.core.replicas.take_alerted():
            if name in self._held:
                self._tell(name, now_s)
        for model in self.core.queue.waiting_models:
            while self._ask_one(model, now_s):
                pass

    def _ask_one(self, model: str, now_s: float) -> bool:
        """Have the first who takes something of a model take it; return whether anybody did."""
        for name in self.core.takers(model, now_s):
            if name in self._held and self._tell(name, now_s):
                return True
        return False

    def _tell(self, replica_id: str, now_s: float) -> bool:
        """Answer a held poll if there is anything to say; return whether there was."""
        reply = self.core.answer(replica_id, now_s)
        if not says_something(reply):
            return False
        self._let_go(replica_id)
        self._answer(self._replicas[replica_id], reply)
        return True

    def _let_go(self, replica_id: str) -> None:
        if (timer := self._held.pop(replica_id, None)) is not None:
            timer.call_off()

    def _expire(self) -> None:
        self._settle(self.core.expire(self._events.now_s))
        self._wake()

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self._keep(outcome)
