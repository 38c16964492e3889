"""How a replica asks for leases: it registers, then polls for as long as it lives."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ray_cluster.errors import DispatcherUnavailable
from ray_cluster.protocol.dispatcher import DispatcherLink
from ray_cluster.protocol.leases import Poll, PollReply, Registration
from ray_cluster.replica.outcome_reporter import back_off

logger = logging.getLogger(__name__)


class LeasePoller:
    """Keeps one poll open at the dispatcher, whoever that is at present.

    Args:
        link: the dispatcher.
        registration: what to register with.
        make_poll: returns what to say to the dispatcher of that epoch.
        poll_s: longest time to wait for something to do.
        on_reply: takes in what it answers to a replica that it knows.

    Attributes:
        poll_s: may be set; the next poll goes by it.
    """

    def __init__(
        self,
        link: DispatcherLink,
        registration: Registration,
        *,
        make_poll: Callable[[int], Poll],
        on_reply: Callable[[PollReply], None],
        poll_s: float,
    ) -> None:
        self._link = link
        self._registration = registration
        self._make_poll = make_poll
        self._on_reply = on_reply
        self.poll_s = poll_s

    async def poll_forever(self) -> None:
        """Register, and poll until cancelled."""
        epoch = await self._register()
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
                epoch = await self._register()

    async def _register(self) -> int:
        failures = 0
        while True:
            try:
                return await self._link.register(self._registration)
            except DispatcherUnavailable as error:
                await back_off(failures, error)
                failures += 1
