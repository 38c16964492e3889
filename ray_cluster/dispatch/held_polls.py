"""Long polls of replicas that are held until there is something to answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from ray_cluster.dispatch.core import DispatchCore
from ray_cluster.protocol.leases import PollReply


class _HeldPoll:
    """A held long poll: offered what waits, or ended to return whatever there is.

    Attributes:
        seen: number of the latest offer to it.
        is_offered: whether it was offered what waits, and has not answered yet.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.is_ended = False
        self.seen = 0
        self.is_offered = False

    def offer(self, number: int) -> None:
        self.seen, self.is_offered = number, True
        self.event.set()

    def end(self) -> None:
        self.is_ended = True
        self.event.set()


class HeldPolls:
    """Holds one poll of each replica, and offers what waits to the right one.

    Replicas get the same offer one after the other, first those that would end the next request
    soonest; one that takes nothing, or cannot answer any more, passes it on. To wake all of them at
    once would search the queue for every request as often as there are replicas.

    Args:
        clock: the service's.
    """

    def __init__(self, core: DispatchCore, clock: Callable[[], float]) -> None:
        self._core = core
        self._clock = clock
        self._by_id: dict[str, _HeldPoll] = {}
        self._num_offers = 0
        self._waking: asyncio.Handle | None = None

    async def hold(self, replica_id: str, wait_s: float) -> PollReply:
        """Wait until there is something to say to the replica, or the poll's time is over."""
        hold_s = min(wait_s, self._core.hold_s_for(replica_id))
        held = self._by_id[replica_id] = _HeldPoll()
        reply = PollReply(known=True)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(hold_s):
                    while not held.is_ended and not says_something(reply):
                        await held.event.wait()
                        held.event.clear()
                        if not held.is_ended:
                            # no await from here to the return: what is leased is also sent
                            reply = self._core.answer(replica_id, self._clock())
                            held.is_offered = held.is_offered and not reply.leases
                            self._pass_on(replica_id, held)
        finally:
            if self._by_id.get(replica_id) is held:
                del self._by_id[replica_id]
            self._pass_on(replica_id, held)
        return reply

    def wake(self) -> None:
        """Answer the polls that there may be something for now: once for all that happens in one
        turn of the event loop, as it looks at every model that waits."""
        if self._waking is None:
            self._waking = asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = None
        self._num_offers += 1
        for model in self._core.queue.waiting_models:
            self._offer(model)
        for replica_id in self._core.replicas.take_alerted():
            if (held := self._by_id.get(replica_id)) is not None:
                held.event.set()

    def end(self, replica_id: str) -> None:
        if (held := self._by_id.pop(replica_id, None)) is not None:
            held.end()

    @property
    def held(self) -> list[str]:
        """Replicas whose polls are held."""
        return list(self._by_id)

    def end_all(self) -> None:
        """End all held polls, and wake none any more."""
        if self._waking is not None:
            self._waking.cancel()
            self._waking = None
        for replica_id in self.held:
            self.end(replica_id)

    def _pass_on(self, replica_id: str, held: _HeldPoll) -> None:
        """Pass on an offer of which this poll took nothing."""
        if not held.is_offered:
            return
        held.is_offered = False
        if (replica := self._core.replicas.get(replica_id)) is not None:
            self._offer(replica.model)

    def _offer(self, model: str) -> None:
        """Make the latest offer to the best replica that has not had it."""
        for replica_id in self._core.takers(model, self._clock()):
            held = self._by_id.get(replica_id)
            if held is not None and held.seen < self._num_offers:
                held.offer(self._num_offers)
                return


def says_something(reply: PollReply) -> bool:
    """Whether a poll is answered with it at once."""
    return reply != PollReply(known=True)
