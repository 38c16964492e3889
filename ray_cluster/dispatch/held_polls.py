"""The long polls of replicas that wait for something to be said."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.protocol.leases import PollReply


class _HeldPoll:
    """A long poll that waits: woken to look again, let go to return whatever there is.

    Attributes:
        seen: the latest news that it was asked about.
        is_asked: whether it was asked, and has not looked yet.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.is_let_go = False
        self.seen = 0
        self.is_asked = False

    def ask(self, news: int) -> None:
        self.seen, self.is_asked = news, True
        self.event.set()

    def let_go(self) -> None:
        self.is_let_go = True
        self.event.set()


class HeldPolls:
    """Holds one poll of each replica, and asks the right ones when there may be a lease to give.

    They are asked one after the other, each once for the same news, first those who would end the
    next request soonest: who takes nothing, or cannot answer any more, hands the question on. To
    ask all of them at once would cost every request as many looks at the queue as there are
    replicas.

    Args:
        clock: the service's.
    """

    def __init__(self, core: DispatchCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._by_id: dict[str, _HeldPoll] = {}
        self._news = 0

    async def hold(self, replica_id: str, wait_s: float) -> PollReply:
        """Wait until there is something to say to the replica, or the poll's time is over."""
        hold_s = min(wait_s, self._core.hold_s_for(replica_id))
        held = self._by_id[replica_id] = _HeldPoll()
        reply = PollReply(known=True)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hold_s):
                    while not held.is_let_go and not says_something(reply):
                        await held.event.wait()
                        held.event.clear()
                        if not held.is_let_go:
                            # no await from here to the return: what is leased is also sent
                            reply = self._core.answer(replica_id, self._clock())
                            held.is_asked = held.is_asked and not reply.leases
                            self._hand_on(replica_id, held)
        finally:
            if self._by_id.get(replica_id) is held:
                del self._by_id[replica_id]
            self._hand_on(replica_id, held)
        return reply

    def wake(self) -> None:
        """Have polls answered that may be told something now."""
        self._news += 1
        for model in self._core.queue.waiting_models:
            self._ask_one(model)
        for replica_id in self._core.replicas.take_alerted():
            if (held := self._by_id.get(replica_id)) is not None:
                held.event.set()

    def let_go(self, replica_id: str) -> None:
        """End a replica's poll, if one is held."""
        if (held := self._by_id.pop(replica_id, None)) is not None:
            held.let_go()

    def let_all_go(self) -> None:
        """End every held poll."""
        for replica_id in list(self._by_id):
            self.let_go(replica_id)

    def _hand_on(self, replica_id: str, held: _HeldPoll) -> None:
        """Ask somebody else what this poll was asked and took nothing for."""
        if not held.is_asked:
            return
        held.is_asked = False
        if (replica := self._core.replicas.get(replica_id)) is not None:
            self._ask_one(replica.model)

    def _ask_one(self, model: str) -> None:
        """Ask who would end the next request soonest and was not asked since the latest news."""
        for replica_id in self._core.takers(model, self._clock()):
            held = self._by_id.get(replica_id)
            if held is not None and held.seen < self._news:
                held.ask(self._news)
                return


def says_something(reply: PollReply) -> bool:
    """Whether a poll is answered with it at once."""
    return (
        not reply.known
        or reply.settings is not None
        or bool(reply.leases or reply.aborts or reply.adopted or reply.preempted)
    )
