"""How a replica asks for leases: it registers, then polls for as long as it lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Poll, PollReply, Registration

logger = logging.getLogger(__name__)

_RETRY_S = (0.1, 0.3, 1.0)


class LeasePoller:
    """Holds one poll open at the present dispatcher.

    Args:
        make_poll: returns the poll for the dispatcher of that epoch.
        on_reply: called with each reply to a replica that the dispatcher knows.
        on_registered: called when a dispatcher knows nothing but the registration.

    Attributes:
        poll_s: longest time to wait for something to do; may be set for the next poll.
        epoch: of the dispatcher that it has registered with; None before.
    """

    def __init__(
        self,
        link: DispatcherLink,
        registration: Registration,
        *,
        make_poll: Callable[[int], Poll],
        on_reply: Callable[[PollReply], None],
        poll_s: float,
        on_registered: Callable[[], None] = lambda: None,
    ) -> None:
        self._link = link
        self._registration = registration
        self._make_poll = make_poll
        self._on_reply = on_reply
        self._on_registered = on_registered
        self.poll_s = poll_s
        self.epoch: int | None = None

    async def poll_forever(self) -> None:
        """Register, and poll until cancelled."""
        epoch = self.epoch = await self._register()
        failures = 0
        while True:
            try:
                reply = await self._link.poll(self._make_poll(epoch), self.poll_s)
            except DispatcherUnavailable as error:
                await back_off(failures, error)
                failures += 1
                continue
            failures = 0
            if reply.known:
                self._on_reply(reply)
            else:
                logger.warning("the dispatcher does not know this replica; registering again")
                epoch = self.epoch = await self._register()

    async def _register(self) -> int:
        failures = 0
        while True:
            try:
                epoch = await self._link.register(self._registration)
            except DispatcherUnavailable as error:
                await back_off(failures, error)
                failures += 1
            else:
                self._on_registered()
                return epoch


async def back_off(failures: int, error: DispatcherUnavailable) -> None:
    """Wait before the dispatcher is tried again, after so many failures before this one."""
    if failures == 0:
        logger.warning("the dispatcher cannot be reached (%s); trying again", error)
    await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])


def check_running(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Raise RuntimeError when one of the tasks, which run until cancelled, has ended."""
    for task in tasks:
        if task.done() and not task.cancelled():
            raise RuntimeError(f"{task.get_name()} has died: {task.exception()}")
