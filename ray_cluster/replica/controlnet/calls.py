"""The steps that a base model's replica has asked ControlNets for, and who is to answer them.

It knows of no threads and links: what is to be sent comes out as orders.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from ray_cluster.engine.controlnets.asks import ControlNetAsk, RowResiduals
from ray_cluster.errors import RequestFailed
from ray_cluster.policies.leasing.controlnet_peers import PeerView, choose_peer, is_silent
from ray_cluster.replica.controlnet.metrics import ControlNetClientMetrics, RetryReason

# for a replica that is connected and computes: as long as its own check of health gives it
LONGEST_SILENCE_S = 60.0
# of the same step in a row: the replica keeps less than one request
_MAX_UNKNOWN = 8
_NEWEST_SHARE = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """Something to be sent to a peer.

    Attributes:
        ask: None to close.
        call: number of the step.
    """

    peer_id: str
    what: Literal["open", "step", "close"]
    key: str
    ask: ControlNetAsk | None = None
    call: int = -1


@dataclass(slots=True, eq=False)
class _Peer:
    """A replica of a ControlNet, while it is connected.

    Attributes:
        keys: of the requests that it keeps.
        outstanding: numbers of the calls that it has not answered, cancelled ones included.
        is_proven: whether it has ever answered.
    """

    peer_id: str
    name: str
    keys: set[str] = field(default_factory=set)
    outstanding: set[int] = field(default_factory=set)
    is_suspect: bool = False
    is_proven: bool = False

    def heard(self, number: int) -> None:
        """It has answered a call."""
        self.outstanding.discard(number)
        self.is_suspect, self.is_proven = False, True

    def view(self, key: str) -> PeerView:
        is_kept = key in self.keys
        return PeerView(self.peer_id, is_kept, len(self.outstanding), self.is_suspect)


@dataclass(frozen=True, slots=True)
class _Sent:
    """When a call went to a peer, and whether the request was opened there for it."""

    at_s: float
    is_first: bool


@dataclass(slots=True, eq=False)
class Call:
    """A step that was asked for.

    Attributes:
        waiting_since_s: since when no peer has it.
        sent: by peer.
    """

    number: int
    ask: ControlNetAsk
    asked_s: float
    waiting_since_s: float
    future: Future[RowResiduals] = field(default_factory=Future)
    sent: dict[str, _Sent] = field(default_factory=dict)
    num_unknown: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """A call that nobody will answer, and why."""

    call: Call
    error: RequestFailed


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What follows from something that has happened.

    Attributes:
        overdue: calls that have had no peer for too long; each check names them again.
    """

    orders: tuple[Order, ...] = ()
    failures: tuple[Failure, ...] = ()
    overdue: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """A call that a peer has answered first.

    Attributes:
        took_s: since that peer was sent it.
    """

    call: Call
    took_s: float


@dataclass(slots=True)
class _Usual:
    """A moving mean of seconds, of all values as long as there are few."""

    mean_s: float = 0.0
    count: int = 0

    def add(self, value_s: float) -> None:
        self.count += 1
        self.mean_s += max(_NEWEST_SHARE, 1 / self.count) * (value_s - self.mean_s)


class ControlNetCalls:
    """All outstanding steps, for one thread at a time.

    Args:
        clock: monotonic seconds, that of the asks' deadlines.
        patience_s: that a step without any connected peer has at least; after it, the step is
            overdue.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        metrics: ControlNetClientMetrics,
        patience_s: float = 5.0,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._patience_s = patience_s
        self._numbers = itertools.count()
        self._peers: dict[str, _Peer] = {}
        self._calls: dict[int, Call] = {}
        self._usual: dict[str, _Usual] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def usual_s(self, name: str) -> float:
        """Return the seconds that an answer of a ControlNet usually takes; 0 if unknown."""
        return self._usual.get(name, _Usual()).mean_s

    def is_suspect(self, peer_id: str) -> bool:
        """Whether a peer has not answered for too long."""
        return peer_id in self._peers and self._peers[peer_id].is_suspect

    def ask(self, ask: ControlNetAsk) -> tuple[Call, Changes]:
        """Take a step; return it, and what is to be sent."""
        now_s = self._clock()
        call = Call(next(self._numbers), ask, now_s, now_s)
        self._calls[call.number] = call
        return call, Changes(self._place(call, self._peers.values()))

    def peer_up(self, peer_id: str, name: str) -> Changes:
        """A replica of a ControlNet is connected."""
        peer = self._peers[peer_id] = _Peer(peer_id, name)
        orders: list[Order] = []
        for call in self._live():
            if not call.sent and call.ask.name == name:
                orders += self._sent(call, peer)
        return Changes(tuple(orders))

    def peer_down(self, peer_id: str) -> Changes:
        """A replica is not connected any more: others get what it has not answered."""
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            return Changes()
        orders: list[Order] = []
        for call in self._live():
            if call.sent.pop(peer_id, None) is not None and not call.sent:
                # one that only comes and goes gives no more time
                if peer.is_proven:
                    call.waiting_since_s = self._clock()
                orders += self._place(call, self._peers.values(), "closed")
        return Changes(tuple(orders))

    def answered(self, peer_id: str, number: int) -> Ended | None:
        """A peer has answered; None if nobody needs that any more."""
        peer, call = self._peers.get(peer_id), self._calls.get(number)
        if peer is None or number not in peer.outstanding:
            return None
        peer.heard(number)
        if call is None or peer_id not in call.sent:
            return None
        del self._calls[number]
        sent = call.sent[peer_id]
        took_s = self._clock() - sent.at_s
        usual = self._usual.setdefault(call.ask.name, _Usual())
        # the first step of a request takes longer, as its prompt and map are prepared
        if not sent.is_first or not usual.count:
            usual.add(took_s)
        return Ended(call, took_s)

    def unknown(self, peer_id: str, number: int, key: str) -> Changes:
        """A peer keeps a request no more: open it there, and send the step again."""
        peer, call = self._peers.get(peer_id), self._calls.get(number)
        if peer is None:
            return Changes()
        peer.heard(number)
        peer.keys.discard(key)
        if call is None or call.future.cancelled() or peer_id not in call.sent:
            return Changes()
        call.num_unknown += 1
        if call.num_unknown > _MAX_UNKNOWN:
            return Changes(failures=(self._failed(call, _kept_too_little(call)),))
        self._metrics.retried(call.ask.name, "unknown")
        return Changes(self._sent(call, peer))

    def forget(self, key: str) -> Changes:
        """A request has left: its peers need not keep it."""
        for call in list(self._calls.values()):
            if call.ask.key == key:
                call.future.cancel()
        self._live()
        keeping = [peer for peer in self._peers.values() if key in peer.keys]
        for peer in keeping:
            peer.keys.discard(key)
        return Changes(tuple(Order(peer.peer_id, "close", key) for peer in keeping))

    def refuse(self, number: int, error: RequestFailed) -> Changes:
        """Nobody can answer a call."""
        call = self._calls.get(number)
        return Changes(failures=() if call is None else (self._failed(call, error),))

    def check(self) -> Changes:
        """See who has been silent for too long, and which steps have waited for too long."""
        now_s, orders, failures, overdue = (
            self._clock(),
            list[Order](),
            list[Failure](),
            list[Call](),
        )
        for call in self._live():
            usual_s = self.usual_s(call.ask.name)
            for peer_id, sent in call.sent.items():
                if is_silent(now_s - sent.at_s, usual_s):
                    self._peers[peer_id].is_suspect = True
        for call in self._live():
            if now_s >= self._until_s(call):
                failures.append(self._failed(call, self._nobody(call, now_s)))
            elif not call.sent and now_s >= call.waiting_since_s + self._patience_s:
                overdue.append(call)
            elif call.sent and all(self._peers[one].is_suspect for one in call.sent):
                others = [
                    peer
                    for peer in self._peers.values()
                    if peer.peer_id not in call.sent and not peer.is_suspect
                ]
                orders += self._place(call, others, "silent")
        return Changes(tuple(orders), tuple(failures), tuple(overdue))

    def _live(self) -> list[Call]:
        """Return the calls that somebody needs, and drop the others."""
        for call in [one for one in self._calls.values() if one.future.cancelled()]:
            self._metrics.ended(call.ask.name, "cancelled")
            del self._calls[call.number]
        return list(self._calls.values())

    def _place(
        self, call: Call, peers: Iterable[_Peer], reason: RetryReason | None = None
    ) -> tuple[Order, ...]:
        """Send a call to one of some peers, if there is one of its ControlNet."""
        views = [peer.view(call.ask.key) for peer in peers if peer.name == call.ask.name]
        chosen = choose_peer(views)
        if chosen is None:
            return ()
        if reason is not None:
            self._metrics.retried(call.ask.name, reason)
        return self._sent(call, self._peers[chosen])

    def _sent(self, call: Call, peer: _Peer) -> tuple[Order, ...]:
        key, is_first = call.ask.key, call.ask.key not in peer.keys
        call.sent[peer.peer_id] = _Sent(self._clock(), is_first)
        peer.outstanding.add(call.number)
        peer.keys.add(key)
        step = Order(peer.peer_id, "step", key, call.ask, call.number)
        return (Order(peer.peer_id, "open", key, call.ask), step) if is_first else (step,)

    def _until_s(self, call: Call) -> float:
        """Return how long a call may wait."""
        if call.sent:
            latest_s = max(sent.at_s for sent in call.sent.values())
            return max(call.ask.deadline_s, latest_s + LONGEST_SILENCE_S)
        return max(call.ask.deadline_s, call.waiting_since_s + self._patience_s)

    def _failed(self, call: Call, error: RequestFailed) -> Failure:
        del self._calls[call.number]
        return Failure(call, error)

    def _nobody(self, call: Call, now_s: float) -> RequestFailed:
        name = call.ask.name
        count = sum(peer.name == name for peer in self._peers.values())
        return RequestFailed(
            f"ControlNet {name!r} has computed no step for {now_s - call.asked_s:.1f} s; "
            f"{count} of its replicas are connected. See whether those of the application "
            f"{name!r} run, and how busy they are: more `replicas`, or `mode: local`",
            "control",
        )


def _kept_too_little(call: Call) -> RequestFailed:
    return RequestFailed(
        f"ControlNet {call.ask.name!r} has dropped the request's prompt and map "
        f"{call.num_unknown} times before it could compute a step: raise its max_cached_mib",
        "control",
    )
