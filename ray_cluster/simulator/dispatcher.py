"""The live dispatch core on virtual time, with replicas that poll it as live ones do.

A free replica always has an open poll: the core answers as soon as it has a lease, and the replica
polls again when the answer has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.dispatch.held_polls import says_something
from ray_cluster.policies.types import Offer
from ray_cluster.protocol.leases import Poll, PollReply, ReplicaEvent, Returned
from ray_cluster.protocol.outcomes import Outcome
from ray_cluster.requests import ImageRequest
from ray_cluster.simulator.events import EventQueue, Timer
from ray_cluster.simulator.replica import SimulatedReplica

OnOutcome = Callable[[Outcome], None]

# between checks whether the core has noticed a death
_CHECK_AGAIN_S = 0.1
# between rounds of housekeeping, at least
_LEAST_S = 0.01


class SimulatedDispatcher:
    """Carries messages between replicas and a dispatch core.

    Args:
        core: the production one.
        on_outcome: called with how every request ended.
        timeout_s: silence after which the core takes a replica for dead.
        one_way_s: seconds that a message takes.
    """

    def __init__(
        self,
        core: DispatchCore,
        events: EventQueue,
        *,
        on_outcome: OnOutcome,
        timeout_s: float,
        one_way_s: float = 0.0,
    ) -> None:
        self.core = core
        self._events = events
        self._on_outcome = on_outcome
        self._timeout_s = timeout_s
        self._one_way_s = one_way_s
        self._replicas: dict[str, SimulatedReplica] = {}
        self._epochs: dict[str, int] = {}
        self._held: dict[str, Timer] = {}
        self._is_catching_up = False

    def register(self, replica: SimulatedReplica) -> None:
        self._replicas[replica.replica_id] = replica
        epoch = self.core.register(replica.registration, self._events.now_s)
        self._epochs[replica.replica_id] = epoch
        self._settle(self.core.take_outcomes())
        self._poll(replica)

    def forget(self, replica_id: str) -> None:
        """Lose a replica without notice; the core finds out by its silence."""
        del self._replicas[replica_id]
        self._release_poll(replica_id)
        self._check_silence(replica_id)

    def _check_silence(self, replica_id: str) -> None:
        """Check after the silence that counts as death; messages on their way may delay that."""
        record = self.core.replicas.get(replica_id)
        if record is None or replica_id in self._replicas:
            return
        due_s = record.heard_s + self._timeout_s
        if due_s > self._events.now_s:
            self._events.at(due_s, partial(self._check_silence, replica_id))
            return
        self._expire()
        if replica_id in self.core.replicas:
            self._events.after(_CHECK_AGAIN_S, partial(self._check_silence, replica_id))

    def unregister(self, replica_id: str) -> None:
        """Sign a replica off; the core knows at once."""
        del self._replicas[replica_id]
        self._release_poll(replica_id)
        self.core.unregister(replica_id, self._events.now_s)
        self._settle(self.core.take_outcomes())
        self._wake()

    def poll_anew(self, replica_id: str) -> None:
        """Renew a replica's held poll, as its capacity has changed."""
        if replica_id in self._held:
            self._poll(self._replicas[replica_id])

    def offer(self, requests: Sequence[ImageRequest]) -> Offer:
        """Offer requests, as for a job without an attached client."""
        offer = self.core.offer(requests, self._events.now_s, client=None)
        if offer.accepted:
            self._settle(self.core.take_outcomes())
            self._wake()
        return offer

    def report(self, replica_id: str, events: Sequence[ReplicaEvent]) -> None:
        """Deliver a replica's report, and renew its poll."""
        self._send(partial(self._deliver_report, replica_id, events))

    def _send(self, act: Callable[[], None]) -> None:
        """Call back when a message has arrived, which may be at once."""
        if self._one_way_s:
            self._events.after(self._one_way_s, act)
        else:
            act()

    def _deliver_report(self, replica_id: str, events: Sequence[ReplicaEvent]) -> None:
        num_waiting = self.core.num_waiting
        outcomes, _ = self.core.report(replica_id, events, self._events.now_s)
        # else what waits is for the next poll of whoever has a slot
        goes_on = not any(isinstance(one, Returned) for one in events)
        goes_on = goes_on and self.core.num_waiting > num_waiting
        self._settle(outcomes)
        self.poll_anew(replica_id)
        if goes_on:
            self._wake()

    def keep_house(self) -> None:
        """Have the core act on what is due from now on, as the live service does."""
        self._expire()
        now_s, due_s = self._events.now_s, self.core.next_event_s()
        wait_s = self.core.hold_s if due_s is None else min(self.core.hold_s, due_s - now_s)
        self._events.after(max(_LEAST_S, wait_s), self.keep_house)

    def _poll(self, replica: SimulatedReplica) -> None:
        """Answer a replica's poll, or hold it."""
        name = replica.replica_id
        if self._replicas.get(name) is not replica:
            return
        self._release_poll(name)
        done = replica.steps_done_by_id()
        poll = Poll(name, self._epochs[name], replica.num_free, done, capacity=replica.capacity)
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
        replica.preempt(reply.preempted)
        replica.take(reply.leases)
        self._send(partial(self._poll, replica))

    def _wake(self) -> None:
        """Answer held polls, in the core's order, until nothing more is leased."""
        now_s = self._events.now_s
        for name in self.core.replicas.take_alerted():
            if name in self._held:
                self._answer_held(name, now_s)
        for model in self.core.queue.waiting_models:
            while self._lease_one(model, now_s):
                pass

    def _lease_one(self, model: str, now_s: float) -> bool:
        """Answer the first replica that leases something of a model; return whether one did."""
        for name in self.core.takers(model, now_s):
            if name in self._held and self._answer_held(name, now_s):
                return True
        return False

    def _answer_held(self, replica_id: str, now_s: float) -> bool:
        """Answer a held poll if there is something to answer; return whether there was."""
        reply = self.core.answer(replica_id, now_s)
        if not says_something(reply):
            return False
        self._release_poll(replica_id)
        self._answer(self._replicas[replica_id], reply)
        return True

    def _release_poll(self, replica_id: str) -> None:
        if (timer := self._held.pop(replica_id, None)) is not None:
            timer.call_off()

    def _expire(self) -> None:
        self._settle(self.core.expire(self._events.now_s))
        self._wake()

    def _settle(self, outcomes: Iterable[Outcome]) -> None:
        self.core.take_deferred()
        for outcome in outcomes:
            self._on_outcome(outcome)
        if self.core.is_behind and not self._is_catching_up:
            self._is_catching_up = True
            self._events.after(0.0, self._catch_up)

    def _catch_up(self) -> None:
        """Do what is left of some work on many requests."""
        self._is_catching_up = False
        self._settle(self.core.catch_up(self._events.now_s))
        self._wake()
